"""A worker ends if its guard is killed, together with the ranks that torchrun started for it."""

import os
import subprocess
import sys

import psutil

from pipeline.orphans import GUARD
from tests.patience import PATIENCE_S

SLEEP = "import time; time.sleep(600)"
RANK = f"from pipeline.orphans import die_with_parent; die_with_parent(); print('up'); {SLEEP}"
# Start a rank in a separate session, as torchrun does.
TORCHRUN = (
    "import subprocess, sys\n"
    f"command = [sys.executable, '-u', '-c', {RANK!r}]\n"
    "subprocess.run(command, start_new_session=True)\n"
)


def test_kill_9_of_the_guard_ends_torchrun_and_its_ranks():
    """The guard's output reaches its end, which shows that no process still holds the pipe."""
    guard = [sys.executable, "-m", "pipeline.launch.guard", sys.executable, "-c", TORCHRUN]
    with subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 2
        process.kill()
        assert process.stdout.read() == b""
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive


def test_a_rank_whose_guard_has_already_ended_does_not_start():
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait(PATIENCE_S)
    done = subprocess.run(
        [sys.executable, "-c", RANK],
        env={**os.environ, GUARD: str(gone.pid)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert f"process {gone.pid}, has ended" in done.stderr


def test_a_rank_in_a_pod_needs_no_guard():
    environment = {name: value for name, value in os.environ.items() if name != GUARD}
    program = RANK.removesuffix(SLEEP)
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=PATIENCE_S)
    assert done.returncode == 0
