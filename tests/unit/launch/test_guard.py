"""The guard: a guarded command does not outlive its launcher, and its exit code is passed on."""

import signal
import subprocess
import sys
import time

from tests.patience import PATIENCE_S


def test_the_guard_reports_a_killed_command_by_its_exit_code():
    command = [sys.executable, "-m", "pipeline.launch.guard", sys.executable, "-c"]
    guard = subprocess.Popen(
        [*command, "import time; time.sleep(600)"], stdin=subprocess.PIPE, text=True
    )
    time.sleep(0.5)
    guard.stdin.close()
    assert guard.wait(PATIENCE_S) == 128 + signal.SIGKILL


def guarded(program: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeline.launch.guard", sys.executable, "-c", program]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_sigterm_reaches_the_command():
    """The command handles SIGTERM itself; only the launcher handles Ctrl-C."""
    program = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)\n"
    )
    with guarded(program) as guard:
        assert guard.stdout.readline() == "ready\n"
        guard.send_signal(signal.SIGINT)
        guard.send_signal(signal.SIGTERM)
        assert guard.wait(PATIENCE_S) == 143
