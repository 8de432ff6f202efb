"""The parts of scripts/gpu_hour.py that can be tested without a GPU."""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from pipeline.hardware import gpu_pool
from pipeline.run import keys
from scripts import gpu_hour
from scripts.gpu_hour import Step, listed_gpus, make, make_all, plan, problem_of, report
from tests.paths import ROOT

SCRIPT = ROOT / "scripts/gpu_hour.sh"
VENV = {"VENV": str(Path(sys.executable).parent.parent)}


def started(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | VENV
    return subprocess.run([SCRIPT, *words], capture_output=True, text=True, env=environment)


def test_a_dry_run_prints_a_plan_whose_commands_exist(tmp_path):
    done = started("--dry-run", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    assert done.stdout.splitlines()[-1] == "dry run: no step was run"
    for step in plan(tmp_path / "out"):
        assert f"{step.name} ({step.gpus} GPUs): expected: {step.expected}\n" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(bool(gpu_pool()), reason="this machine has GPUs")
def test_without_a_gpu_no_step_is_run(tmp_path):
    done = started("--out", str(tmp_path / "out"))
    assert done.returncode == 2
    assert "no step was run: trainer.device: found cuda" in done.stderr
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
        (gpu_hour.tests("tests/unit/test_gpu_hour.py::test_gone"), "test_gone does not exist"),
        (("-m", "benchmarks.gone"), "benchmarks.gone does not exist"),
        (("scripts/gone.py",), "scripts/gone.py does not exist"),
    ],
)
def test_a_dry_run_detects_an_invalid_command(command, says):
    assert says in (problem_of(Step("x", command, "y")) or "")


def test_a_failed_step_is_reported_and_the_next_steps_run(tmp_path):
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
        "**missed**: not finished after 5 s",
        "**missed**: | 3% | **missed** |",
        "**missed**: KeyError: 'replay/coverage'",
        "**missed**: not all tests ran: 3 passed, 1 skipped in 2 s",
        "met",
    ]
    page = report(tmp_path, 1, "GPU 0", rows)
    assert "\n    GPU 0\n" in page
    assert "| is right | f | met | 1 |" in page
    assert "| fails | a | **missed**: exit code 1: no GPU | 1 |" in page


def test_no_process_of_a_step_outlives_its_time_limit(tmp_path):
    """This includes processes in new sessions, in which `retrace run` and torchrun start
    workers."""
    child = (
        "import subprocess, sys, time; command = [sys.executable, '-c', 'import time; "
        "time.sleep(60)']; print(subprocess.Popen(command, start_new_session=True).pid, "
        "flush=True); time.sleep(60)"
    )
    assert make(Step("hangs", ("-c", child), "x"), tmp_path, (), 5.0).endswith("after 5 s")
    assert not psutil.pid_exists(int((tmp_path / "hangs.log").read_text()))


def test_all_steps_together_have_a_time_limit(tmp_path, monkeypatch):
    steps = [Step(name, ("-c", "import time; time.sleep(60)"), "x") for name in "abc"]
    monkeypatch.setattr(gpu_hour, "LIMIT_S", 2.0)
    monkeypatch.setattr(gpu_hour, "TOTAL_S", 3.0)
    started = time.monotonic()
    assert make_all(steps, tmp_path, ("0",)) == 1
    assert time.monotonic() - started < 30
    a, b, c = (tmp_path / "report.md").read_text().splitlines()[-3:]
    assert "**missed**: not finished after 2 s" in a
    assert "**missed**: not finished after 1 s" in b or "not finished after 0 s" in b
    assert "**missed**: not run: the limit of 3 s for all steps was reached" in c


def asked(folder: Path, gpus: int | None) -> argparse.Namespace:
    return argparse.Namespace(out=folder, gpus=gpus, resume=False, dry_run=False)


def test_steps_see_the_requested_number_of_gpus(tmp_path, monkeypatch):
    show = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
    steps = [Step("few", ("-c", show), "x", 2), Step("many", ("-c", show), "x", 8)]
    monkeypatch.setattr(gpu_hour, "choose_device", lambda _: None)
    monkeypatch.setattr(gpu_hour, "gpu_pool", lambda: ("3", "5", "7"))
    monkeypatch.setattr(gpu_hour, "plan", lambda _: steps)
    for gpus, visible in ((2, "3,5"), (None, "3,5,7")):
        folder = tmp_path / visible
        assert gpu_hour.main(asked(folder, gpus)) == 0
        assert (folder / "few.log").read_text().strip() == visible
        verdict = f"not run: {len(visible.split(','))} GPUs found, 8 required"
        assert f"| many | x | {verdict} | 0 |" in (folder / "report.md").read_text()


def test_an_existing_folder_and_missing_gpus_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu_hour, "choose_device", lambda _: None)
    monkeypatch.setattr(gpu_hour, "gpu_pool", lambda: ("0",))
    assert gpu_hour.main(asked(tmp_path, 1)) == 2
    assert f"{tmp_path} exists; name a new folder with --out" in capsys.readouterr().err
    assert gpu_hour.main(asked(tmp_path / "new", 8)) == 2
    assert "found 1 GPUs, --gpus is 8" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_without_nvidia_smi_the_report_shows_the_error(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    assert listed_gpus().startswith("nvidia-smi: [Errno 2]")


RUN = """
import sys, time
from pathlib import Path

folder, then, *keys = sys.argv[1:]
second = Path(folder, "started").exists()
Path(folder, "started").touch()
log = Path(folder, "local/resumed/logs/training-0.log")
log.parent.mkdir(parents=True, exist_ok=True)
for key in keys:
    path = Path(folder, "store/resumed", key)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")
with log.open("a") as file:
    file.write("start\\n" + then * second)
if not second and then != "end":
    time.sleep(60)
"""
"""A program that writes objects and log lines as a run does, then waits to be killed."""
COMPLETE = (*map(keys.metrics, range(4)), keys.checkpoint(3))


def resume_of(folder: Path, monkeypatch: pytest.MonkeyPatch, then: str, *written: str) -> str:
    """Let the script kill and resume a program, and return the script's complaint.

    Args:
        folder: The report's folder.
        monkeypatch: The test's fixture.
        then: Text that the second start writes to the log, or `end` if the first one ends early.
        written: Keys of the objects that the first start writes.
    """
    words = ("-c", RUN, str(folder), then, *written)
    monkeypatch.setattr(gpu_hour, "run_words", lambda *_: words)
    monkeypatch.setattr(gpu_hour, "LIMIT_S", 10.0)
    with pytest.raises(SystemExit) as complaint:
        gpu_hour.resume(folder)
    return str(complaint.value)


@pytest.mark.parametrize(
    ("then", "written", "says"),
    [
        (
            "",
            (*COMPLETE[:-1], keys.checkpoint_file(3, "0a", "x")),
            "4 steps and its last checkpoint was of policy 0",
        ),
        ("", (*COMPLETE, keys.metrics(4), keys.metrics(5)), "finished 6 steps"),
        ("end", COMPLETE[:2], "ended with exit code 0 before it could be killed"),
        ("", COMPLETE, "continued from policy 0, expected policy 3"),
        (f"{gpu_hour.CONTINUED}2\n", COMPLETE, "continued from policy 2, expected policy 3"),
    ],
)
def test_a_resumed_run_must_load_its_checkpoint(tmp_path, monkeypatch, then, written, says):
    assert says in resume_of(tmp_path, monkeypatch, then, *written)


def test_a_trainer_logs_the_checkpoint_from_which_it_continues():
    assert f'"{gpu_hour.CONTINUED}%d"' in (ROOT / "operators/training/worker.py").read_text()


@pytest.mark.parametrize(
    ("changed", "agreement", "says"),
    [
        (0.0, 1.0, None),
        (0.001, 1.0, "step 1: policy_loss/changed 0.001"),
        (0.0, 0.999, "step 1: replay/agreement 0.999"),
    ],
)
def test_each_changed_log_prob_is_reported(tmp_path, monkeypatch, changed, agreement, says):
    rows = [
        {"step": step, "actor/ppo_kl": 0.0, "policy_loss/changed": a, "replay/agreement": b}
        for step, (a, b) in enumerate([(0.0, 1.0), (changed, agreement)])
    ]
    run = SimpleNamespace(metrics=lambda: SimpleNamespace(to_pylist=lambda: rows))
    monkeypatch.setattr(gpu_hour.retrace, "open_run", lambda _: run)
    assert gpu_hour.same_bits("x")("", tmp_path) == says


def test_opposite_changes_are_counted():
    """The file selects deterministic kernels for its process, so it runs in a separate one."""
    program = """
import torch
from types import SimpleNamespace
from pipeline.rl.custom import LOSS, load_custom

loss = load_custom(open("scripts/gpu_loss.py", "rb").read(), "exact", LOSS)
assert torch.are_deterministic_algorithms_enabled()
old_T = torch.tensor([-1.0, -2.0, -3.0])
tokens = SimpleNamespace(
    logprobs_T=(old_T + torch.tensor([0.5, -0.5, 0.0])).requires_grad_(),
    old_T=old_T,
    advantages_T=torch.ones(3),
    weights_T=None,
)
settings = SimpleNamespace(clip_low=0.2, clip_high=0.2, clip_ratio_c=3.0)
made = loss(tokens, settings)
assert made.reports["changed"].tolist() == [True, True, False], made
assert {"clipped", "dual_clipped"} <= made.reports.keys() and made.loss_T.requires_grad
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_r2_is_tested_in_layouts_that_split_tensors_experts_and_sequences(tmp_path):
    steps = {step.name: step for step in plan(tmp_path)}
    for name, size in (("tp2", "tensor"), ("ep2", "expert"), ("cp2", "context")):
        step = steps[f"R2 in layout {name}"]
        split = f"{size}_model_parallel_size" if size != "context" else "context_parallel_size"
        assert {
            f"{gpu_hour.MEGATRON}.{split}=2",
            "trainer.n_gpus_per_node=2",
            f"{gpu_hour.ACTOR}.router_replay.mode=R2",
        } <= set(step.command)
        assert step.gpus == 3  # the engine has its own
