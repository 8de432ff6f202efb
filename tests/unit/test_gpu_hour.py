"""The script for the first hour on GPUs, as far as a machine without one can tell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.hardware import gpu_pool
from scripts import gpu_hour
from scripts.gpu_hour import Step, make, plan, problem_of, report
from tests.paths import ROOT

SCRIPT = ROOT / "scripts/gpu_hour.sh"
VENV = {"VENV": str(Path(sys.executable).parent.parent)}


def started(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | VENV
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, env=environment)


def test_a_dry_run_prints_a_plan_in_which_every_command_exists(tmp_path):
    done = started("--dry-run", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    assert done.stdout.splitlines()[-1] == "a dry run: nothing was run, and nothing is claimed"
    for step in plan(tmp_path / "out"):
        assert f"{step.name} ({step.gpus} GPUs): expected: {step.expected}\n" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(bool(gpu_pool()), reason="this machine has GPUs")
def test_without_a_gpu_nothing_is_claimed(tmp_path):
    done = started("--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "nothing was run, and nothing is claimed: trainer.device: found cuda" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ((*gpu_hour.RETRACE, "run", gpu_hour.EXAMPLE, "trainer.sede=1"), "trainer.sede"),
        (
            (
                *gpu_hour.RETRACE,
                "run",
                gpu_hour.EXAMPLE,
                f"{gpu_hour.MEGATRON}.tensor_model_parallel_size=3",
            ),
            "3",
        ),
        (gpu_hour.tests("tests/unit/test_gpu_hour.py::test_gone"), "test_gone is not there"),
        (("-m", "benchmarks.gone"), "benchmarks.gone is not there"),
        (("scripts/gone.py",), "scripts/gone.py is not there"),
    ],
)
def test_a_command_that_is_wrong_is_found_before_there_is_a_gpu(command, says):
    assert says in (problem_of(Step("x", command, "y")) or "")


def test_a_failed_step_is_in_the_report_and_ends_nothing(tmp_path, monkeypatch):
    def missed(output: str, folder: Path) -> str:
        raise KeyError("replay/coverage")

    steps = [
        Step("fails", ("-c", "print('x'); raise SystemExit('no GPU')"), "a"),
        Step("hangs", ("-c", "import time; time.sleep(60)"), "b"),
        Step("misses", ("-c", "print('| 3% | **missed** |')"), "c", 1, gpu_hour.no_missed_limit),
        Step("has no metrics", ("-c", "pass"), "d", 1, missed),
        Step(
            "skips", ("-c", "print('3 passed, 1 skipped in 2 s')"), "e", 1, gpu_hour.nothing_skipped
        ),
        Step("is right", ("-c", "print('3 passed in 2 s')"), "f", 1, gpu_hour.nothing_skipped),
    ]
    monkeypatch.setattr(gpu_hour, "LIMIT_S", 5.0)
    rows = [(step, make(step, tmp_path), 1.0) for step in steps]
    assert [verdict for _, verdict, _ in rows] == [
        "**missed**: exit code 1: no GPU",
        "**missed**: not done after 5 s",
        "**missed**: | 3% | **missed** |",
        "**missed**: KeyError: 'replay/coverage'",
        "**missed**: not all tests ran: 3 passed, 1 skipped in 2 s",
        "met",
    ]
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess((), 0, "GPU 0")
    )
    page = report(tmp_path, 1, rows)
    assert "| is right | f | met | 1 |" in page
    assert "| fails | a | **missed**: exit code 1: no GPU | 1 |" in page
