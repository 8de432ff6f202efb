"""No local worker outlives its guard, even one that is killed with SIGKILL.

The guard kills what it started when it can. When it is killed itself, only the kernel can act: it
kills a process whose parent ends, if that process asked for it (`prctl(2)`, PR_SET_PDEATHSIG). The
request holds for the process that makes it and not for its children, so the guard's command and
every rank that torchrun starts make their own.
"""

import ctypes
import os
import signal

import psutil

GUARD = "RETRACE_GUARD"
"""Environment variable with the guard's process id. Pods have no guard and do not set it."""

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends; exit if the guard has ended already.

    Linux means the thread that started this process, not the parent as a whole. The guard and
    torchrun start processes from their main threads.

    Raises OSError when the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    guard = os.environ.get(GUARD)
    # A parent that ended before the request was made is missed by the kernel.
    if guard is not None and int(guard) not in {p.pid for p in psutil.Process().parents()}:
        raise SystemExit(f"the guard of this worker, process {guard}, has ended")
