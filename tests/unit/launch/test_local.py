"""Local workers: they end with their launcher, restart after failures, and report the cause."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipeline.launch import local
from pipeline.launch.base import LaunchError, Stage, StageFailedError, StageLastingError
from pipeline.launch.local import LocalWorkers, devices_of, local_workers, training_stage
from pipeline.run.wait import wait_for_any
from pipeline.store import open_store
from tests.patience import PATIENCE_S, eventually

SLEEPER = """
import subprocess, sys, time
child = [sys.executable, '-c', 'import time; time.sleep(600)  # {tag}']
subprocess.Popen(child, start_new_session=True)
time.sleep(600)  # {tag}
"""


def processes_with(tag: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or [])
        if tag in command and "guard" not in command and process.info["status"] != "zombie":
            found.append(process)
    return found


def wait_until(condition) -> None:
    eventually(condition, lambda: "condition not reached")


def test_kill_9_of_the_launcher_leaves_no_orphan(tmp_path: Path):
    """The worker starts a child in a separate session, as torchrun does; both end."""
    tag = f"orphan-{os.getpid()}-{tmp_path.name}"
    program = (
        "import sys, time; from pathlib import Path\n"
        "from pipeline.launch.base import Stage\n"
        "from pipeline.launch.local import LocalWorkers\n"
        f"workers = LocalWorkers(Path({str(tmp_path)!r}), print)\n"
        f"command = (sys.executable, '-c', {SLEEPER.format(tag=tag)!r})\n"
        "workers.start(Stage('w', (command,), 0, {}))\n"
        "time.sleep(600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program])
    try:
        # The launcher's command line also contains the tag.
        wait_until(lambda: len(processes_with(tag)) == 3)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    wait_until(lambda: not processes_with(tag))


def test_stop_kills_workers_that_do_not_end(tmp_path: Path):
    tag = f"stop-{os.getpid()}-{tmp_path.name}"
    stage = Stage("w", ((sys.executable, "-c", SLEEPER.format(tag=tag)),), 0, {})
    with local_workers(tmp_path, [stage], print):
        wait_until(lambda: len(processes_with(tag)) == 2)
    assert not processes_with(tag)


def test_a_failing_worker_is_restarted_then_reported_with_its_log(tmp_path: Path):
    said: list[str] = []
    workers = LocalWorkers(tmp_path, said.append)
    command = (sys.executable, "-c", "print('no expert left'); raise SystemExit(3)")
    workers.start(Stage("rollout", (command,), 2, {}, lambda: "training step 0 again"))

    def check_forever() -> None:
        while True:
            workers.check()
            time.sleep(0.05)

    with pytest.raises(StageFailedError) as error:
        check_forever()
    assert ["restart 1 of 2" in said[0], "restart 2 of 2" in said[2]] == [True, True]
    assert said[1::2] == ["training step 0 again"] * 2
    assert "rollout worker 0 ended with exit code 3 after 2 restarts" in str(error.value)
    assert "SIGKILL" not in str(error.value)
    assert "no expert left" in str(error.value)
    with pytest.raises(StageFailedError):  # later calls raise the same error
        workers.check()
    assert (tmp_path / "rollout-0.log").read_text().count("no expert left") == 3


@pytest.mark.parametrize(
    "program",
    [
        "print('10:00 ERROR RewardError: no such rubric'); raise SystemExit(78)",
        "print('10:00 ERROR RewardError: no such rubric\\ntorch.distributed.elastic\\n'"
        "'  exitcode  : 78 (pid: 7)'); raise SystemExit(1)",
    ],
    ids=["worker", "rank below torchrun"],
)
def test_an_error_that_would_recur_fails_without_a_restart(tmp_path: Path, program: str):
    said: list[str] = []
    workers = LocalWorkers(tmp_path, said.append)
    workers.start(Stage("rollout", ((sys.executable, "-c", program),), 3, {}))
    with pytest.raises(StageLastingError) as error:
        wait_for_any(open_store(str(tmp_path)), ["never"], PATIENCE_S, "nobody", workers.check)
    assert said == []
    assert "and was not restarted, because the error would recur" in str(error.value)
    assert "no such rubric" in str(error.value)
    assert (tmp_path / "rollout-0.log").read_text().count("no such rubric") == 1


def test_stopping_workers_ends_the_wait_of_other_threads(tmp_path: Path):
    """Without this, a task that waits for an object would keep waiting after Ctrl-C until its
    timeout."""
    said: list[str] = []
    workers = LocalWorkers(tmp_path, said.append)
    workers.start(Stage("w", ((sys.executable, "-c", "import time; time.sleep(600)"),), 3, {}))
    heard: list[str] = []

    def wait() -> None:
        try:
            wait_for_any(open_store(str(tmp_path)), ["never"], 600, "nobody", workers.check)
        except StageFailedError as error:
            heard.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    workers.stop(grace_s=0)
    thread.join(PATIENCE_S)
    assert heard == ["the workers were stopped"]
    assert said == []


def test_the_cause_is_shown_without_torchruns_report(tmp_path: Path):
    """torchrun's long report follows the rank's own error."""
    log = [
        "10:00:00 INFO operators.training.worker: step 0: manifest after 3.3 s",
        "10:00:01 ERROR operators.training: TraceError: sample 000000/17/2: no routes",
        "E1121 03:58 torch/distributed/elastic/multiprocessing/api.py:1026] failed (exitcode: 1)",
        *["torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"] * 40,
    ]
    (tmp_path / "training-0.log").write_text("=== start of worker training 0\nold ERROR old\n")
    said: list[str] = []
    workers = LocalWorkers(tmp_path, said.append)
    program = f"print({chr(10).join(log)!r}); raise SystemExit(1)"
    workers.start(Stage("training", ((sys.executable, "-c", program),), 0, {}))
    with pytest.raises(StageFailedError) as error:
        wait_for_any(open_store(str(tmp_path)), ["never"], PATIENCE_S, "nobody", workers.check)
    assert str(error.value).splitlines()[1:] == [f"  | {log[1]}"]


@pytest.mark.parametrize("torchrun", [False, True])
def test_a_folder_named_pipeline_in_the_current_folder_does_not_hide_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchrun: bool
):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    stage = training_stage("unused", 0, ranks=1, max_restarts=0, threads=1, devices=())
    prefix = stage.commands[0][: stage.commands[0].index("operators.training")]
    command = (*(prefix if torchrun else (sys.executable, "-m")), "pipeline.exits")
    stage = replace(stage, commands=(command,))
    with local_workers(tmp_path / "logs", [stage], print) as workers:
        [worker] = workers._workers
        code = worker.process.wait(PATIENCE_S)
    assert code == 0, (tmp_path / "logs/training-0.log").read_text()


def test_no_gpu_belongs_to_two_workers():
    pool = [str(index) for index in range(8)]
    assert devices_of(pool, 4, 2, 2) == ("0,1,2,3", "4,5", "6,7")
    assert devices_of(pool, 1, 2, 1) == ("0", "1", "2")
    assert devices_of(["5", "GPU-8932f937"], 1, 1, 1) == ("5", "GPU-8932f937")
    assert devices_of(pool, 8, 0, 1) == ("0,1,2,3,4,5,6,7",)
    assert devices_of([], 48, 9, 1) == ()


def test_the_only_gpu_of_a_machine_is_shared():
    assert devices_of(["3"], 1, 2, 1) == ("3", "3", "3")


@pytest.mark.parametrize(
    ("gpus", "ranks", "workers", "tensor_parallel", "wanted"),
    [(8, 9, 0, 1, 9), (8, 1, 1, 9, 10), (8, 4, 3, 2, 10), (1, 2, 0, 1, 2), (1, 1, 1, 2, 3)],
)
def test_a_run_that_needs_more_gpus_is_refused(gpus, ranks, workers, tensor_parallel, wanted):
    with pytest.raises(LaunchError, match=f"this machine: {gpus} .*; the run needs {wanted}: "):
        devices_of([str(index) for index in range(gpus)], ranks, workers, tensor_parallel)


def test_each_worker_sees_its_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7,3")
    program = "import os; print('sees', os.environ['CUDA_VISIBLE_DEVICES'])"
    commands = ((sys.executable, "-c", program),) * 2
    stages = [
        Stage("rollout", commands, 0, {}, devices=("7", "3")),
        Stage("untouched", commands[:1], 0, {}),
    ]
    with local_workers(tmp_path, stages, print) as workers:
        for worker in workers._workers:
            assert worker.process.wait(PATIENCE_S) == 0
    assert "sees 7\n" in (tmp_path / "rollout-0.log").read_text()
    assert "sees 3\n" in (tmp_path / "rollout-1.log").read_text()
    assert "sees 6,7,3\n" in (tmp_path / "untouched-0.log").read_text()


@pytest.mark.parametrize(
    ("hidden", "overlap", "threads"),
    [(64, False, 1), (255, True, 1), (256, False, 4), (2048, False, 4), (2048, True, 2)],
)
def test_a_tiny_model_gets_one_thread_per_worker(
    monkeypatch: pytest.MonkeyPatch, hidden: int, overlap: bool, threads: int
):
    """Workers of other models share 8 cores evenly."""
    monkeypatch.setattr(local, "core_count", lambda: 8)
    assert local.threads_per_worker(2, 2, overlap, hidden) == threads
