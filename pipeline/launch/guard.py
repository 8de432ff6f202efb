"""Run a command that must not outlive its launcher: `python -m pipeline.launch.guard CMD...`

The launcher holds the other end of this process's standard input. When that pipe closes, for
whatever reason (kill -9 included), every descendant of the command is killed. The guard is their
subreaper, so a rank whose torchrun died is still found. The guard ends with the command's exit
code, 128 + N for a command killed by signal N. SIGTERM is passed on to the command. When the guard
itself is killed, the kernel kills the command: see `pipeline.orphans`.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO

import psutil

from pipeline.orphans import GUARD, die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.2


def start_guarded(
    command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command under a guard, both in a session of their own: Ctrl-C in a terminal reaches
    the launcher alone, which stops in order.

    `output` takes what they print; `environment` is added to the launcher's own. The command is
    killed when the process's standard input is closed, and whenever this process ends.
    """
    return subprocess.Popen(
        (sys.executable, "-m", "pipeline.launch.guard", *command),
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={
            **os.environ,
            # `python -m` puts the current folder first on the path, where a folder called pipeline
            # would hide this package. A variable, because torchrun starts Python by itself.
            "PYTHONSAFEPATH": "1",
            **environment,
        },
        start_new_session=True,
    )


def main(command: list[str]) -> int:
    """Run the command under guard and return its exit code."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")
    os.environ[GUARD] = str(os.getpid())
    # preexec_fn is safe here: this process has one thread.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)
    signal.signal(signal.SIGTERM, lambda number, _: child.send_signal(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's to handle
    while child.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    kill_descendants(child)
    code = child.wait()
    return code if code >= 0 else 128 - code


def kill_descendants(child: subprocess.Popen[bytes]) -> None:
    """Kill every descendant; repeat, because a dying process may have just started another."""
    while alive := [p for p in psutil.Process().children(recursive=True) if _is_alive(p)]:
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        child.wait()  # only its Popen may reap it, or its exit code would be lost
        psutil.wait_procs([p for p in alive if p.pid != child.pid], timeout=1)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
