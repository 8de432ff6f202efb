"""Local workers die with their launcher, restart when they fail, and say why they failed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.launch.base import Stage, StageFailedError
from pipeline.launch.local import LocalWorkers, local_workers

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


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not reached"
        time.sleep(0.05)


def test_kill_9_of_the_launcher_leaves_no_orphan(tmp_path: Path):
    """The worker starts a child in a session of its own, as torchrun does; all of them die."""
    tag = f"orphan-{os.getpid()}-{tmp_path.name}"
    program = (
        "import sys, time; from pathlib import Path\n"
        "from pipeline.launch.base import Stage\n"
        "from pipeline.launch.local import LocalWorkers\n"
        f"workers = LocalWorkers(Path({str(tmp_path)!r}))\n"
        f"command = (sys.executable, '-c', {SLEEPER.format(tag=tag)!r})\n"
        "workers.start(Stage('w', (command,), 0, {}))\n"
        "time.sleep(600)\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", program])
    try:
        # The launcher's own command line holds the tag too.
        wait_until(lambda: len(processes_with(tag)) == 3)
    finally:
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
    wait_until(lambda: not processes_with(tag))


def test_stop_kills_what_does_not_end_by_itself(tmp_path: Path):
    tag = f"stop-{os.getpid()}-{tmp_path.name}"
    stage = Stage("w", ((sys.executable, "-c", SLEEPER.format(tag=tag)),), 0, {})
    with local_workers(tmp_path, [stage]):
        wait_until(lambda: len(processes_with(tag)) == 2)
    assert not processes_with(tag)


def test_failing_worker_is_restarted_then_reported_with_its_log(tmp_path: Path):
    workers = LocalWorkers(tmp_path)
    command = (sys.executable, "-c", "print('no expert left'); raise SystemExit(3)")
    workers.start(Stage("rollout", (command,), 2, {}))

    def check_forever() -> None:
        while True:
            workers.check()
            time.sleep(0.05)

    with pytest.raises(StageFailedError) as error:
        check_forever()
    assert workers.restarts() == {"rollout": 2}
    assert "rollout worker 0 ended with exit code 3 after 2 restarts" in str(error.value)
    assert "no expert left" in str(error.value)
    with pytest.raises(StageFailedError):  # whoever asks later hears of it too
        workers.check()
    assert (tmp_path / "rollout-0.log").read_text().count("no expert left") == 3


def test_worker_that_ends_well_is_not_restarted(tmp_path: Path):
    workers = LocalWorkers(tmp_path)
    workers.start(Stage("rollout", ((sys.executable, "-c", "pass"),), 0, {"A": "b"}))
    workers.stop(grace_s=20)
    workers.check()
    assert workers.restarts() == {"rollout": 0}
