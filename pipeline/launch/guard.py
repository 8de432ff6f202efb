"""Run a command that must not outlive its launcher: `python -m pipeline.launch.guard CMD...`

The launcher holds the other end of the pipe that is this process's standard input. When the pipe
closes for any reason, including kill -9 of the launcher, the guard kills every descendant of the
command. As a subreaper, the guard also finds ranks whose torchrun has died. The guard exits with
the command's exit code, or with 128 + N if signal N killed the command. It passes SIGTERM on
to the command. If the guard itself is killed, the kernel kills the command: see `pipeline.orphans`.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

import psutil

from pipeline.orphans import GUARD, die_with_parent, prctl

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2


def start_guarded(
    command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command under a guard, and return the guard's process.

    The guard kills the command when the standard input of the returned process is closed, or when
    the calling process ends. The guard and the command run in a separate session, so that Ctrl-C in
    a terminal reaches only the launcher. The launcher then stops them in an orderly way.

    Args:
        command: The words of the command.
        output: The file for the output of the guard and the command, including standard error.
        environment: Variables added to the launcher's environment.
    """
    return subprocess.Popen(
        (sys.executable, "-m", "pipeline.launch.guard", *command),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            # `python -m` puts the current folder first on the path, where a folder named pipeline
            # would hide this package. Python's option -P would not reach torchrun's processes.
            "PYTHONSAFEPATH": "1",
            **environment,
        },
        start_new_session=True,
    )


def main(command: list[str]) -> int:
    """Run the command as its guard, and return its exit code."""
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.environ[GUARD] = str(os.getpid())
    # preexec_fn is safe here, because this process has only one thread.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    while child.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    kill_descendants(child)
    code = child.wait()
    return code if code >= 0 else 128 - code


def kill_descendants(child: subprocess.Popen[bytes]) -> None:
    """Kill all descendants; repeat until none is alive, because a dying one may start another."""
    while alive := [p for p in psutil.Process().children(recursive=True) if _is_alive(p)]:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.wait()  # only the child's Popen may reap it, or its exit code would be lost
        psutil.wait_procs([p for p in alive if p.pid != child.pid], timeout=1)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
