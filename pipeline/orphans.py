"""Ends local workers together with their guard, even if the guard is killed with SIGKILL.

The guard kills its child processes when it can. When the guard itself is killed, only the kernel
can act: it kills a process whose parent has ended, if that process has requested this (`prctl(2)`,
PR_SET_PDEATHSIG). Because the request does not apply to the process's children, the guard's command
and each rank that torchrun starts make their own requests.
"""

import ctypes
import os
import signal

import psutil

GUARD = "RETRACE_GUARD"
"""The environment variable that contains the guard's process id. Pods have no guard and do not set
it."""

_PR_SET_PDEATHSIG = 1


def prctl(option: int, value: int) -> None:
    """Set an option of this process. Raises OSError if the kernel refuses it."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; exit if the guard has already ended.

    On Linux, the kernel acts when the thread that started this process ends, even if the thread's
    own process lives on. The guard and torchrun start processes only from their main threads.

    Raises OSError if the kernel refuses the request.
    """
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    guard = os.environ.get(GUARD)
    # The kernel takes no action if the parent ended before the request.
    if guard is not None and int(guard) not in {p.pid for p in psutil.Process().parents()}:
        raise SystemExit(f"the guard of this worker, process {guard}, has ended")
