"""The script for the first hour on GPUs, as far as a machine without one can tell."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.hardware import gpu_pool
from scripts import gpu_hour
from scripts.gpu_hour import Step, listed_gpus, make, make_all, plan, problem_of, report
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


def test_a_failed_step_is_in_the_report_and_ends_nothing(tmp_path):
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
    rows = [(step, make(step, tmp_path, (), 5.0), 1.0) for step in steps]
    assert [verdict for _, verdict, _ in rows] == [
        "**missed**: exit code 1: no GPU",
        "**missed**: not done after 5 s",
        "**missed**: | 3% | **missed** |",
        "**missed**: KeyError: 'replay/coverage'",
        "**missed**: not all tests ran: 3 passed, 1 skipped in 2 s",
        "met",
    ]
    page = report(tmp_path, 1, "GPU 0", rows)
    assert "\n    GPU 0\n" in page
    assert "| is right | f | met | 1 |" in page
    assert "| fails | a | **missed**: exit code 1: no GPU | 1 |" in page


def test_nothing_of_a_step_outlives_its_time(tmp_path):
    """Nor what it has started in a session of its own, as `retrace run` and torchrun do."""
    child = (
        "import subprocess, sys, time; command = [sys.executable, '-c', 'import time; "
        "time.sleep(60)']; print(subprocess.Popen(command, start_new_session=True).pid, "
        "flush=True); time.sleep(60)"
    )
    assert make(Step("hangs", ("-c", child), "x"), tmp_path, (), 5.0).endswith("after 5 s")
    assert not psutil.pid_exists(int((tmp_path / "hangs.log").read_text()))


def test_all_steps_together_have_an_hour(tmp_path, monkeypatch):
    steps = [Step(name, ("-c", "import time; time.sleep(60)"), "x") for name in "abc"]
    monkeypatch.setattr(gpu_hour, "LIMIT_S", 2.0)
    monkeypatch.setattr(gpu_hour, "TOTAL_S", 3.0)
    started = time.monotonic()
    assert make_all(steps, tmp_path, ("0",)) == 1
    assert time.monotonic() - started < 30
    a, b, c = (tmp_path / "report.md").read_text().splitlines()[-3:]
    assert "**missed**: not done after 2 s" in a
    assert "**missed**: not done after 1 s" in b or "not done after 0 s" in b
    assert "**missed**: not run: 3 s were over" in c


def asked(folder: Path, gpus: int | None) -> argparse.Namespace:
    return argparse.Namespace(out=folder, gpus=gpus, resume=False, dry_run=False)


def test_steps_see_as_many_gpus_as_asked_for(tmp_path, monkeypatch):
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    steps = [Step("few", ("-c", show), "x", 2), Step("many", ("-c", show), "x", 8)]
    monkeypatch.setattr(gpu_hour, "choose_device", lambda _: None)
    monkeypatch.setattr(gpu_hour, "gpu_pool", lambda: ("3", "5", "7"))
    monkeypatch.setattr(gpu_hour, "plan", lambda _: steps)
    for gpus, visible in ((2, "3,5"), (None, "3,5,7")):
        folder = tmp_path / visible
        assert gpu_hour.main(asked(folder, gpus)) == 0
        assert (folder / "few.log").read_text().strip() == visible
        assert "| many | x | not run: it needs 8 GPUs | 0 |" in (folder / "report.md").read_text()


def test_a_second_run_needs_a_new_folder_and_no_run_more_gpus_than_there_are(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(gpu_hour, "choose_device", lambda _: None)
    monkeypatch.setattr(gpu_hour, "gpu_pool", lambda: ("0",))
    assert gpu_hour.main(asked(tmp_path, 1)) == 2
    assert f"{tmp_path} exists; name a new folder: --out FOLDER" in capsys.readouterr().err
    assert gpu_hour.main(asked(tmp_path / "new", 8)) == 2
    assert "--gpus 8, found 1" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_machine_without_nvidia_smi_has_a_report_too(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert listed_gpus().startswith("nvidia-smi: [Errno 2]")
