"""How Ctrl-C and SIGTERM end a command that has started other processes.

    first signal    says what happens and raises KeyboardInterrupt: what was started ends in order
    second signal   ends this process at once, as does the clock when the order takes too long

Nothing is left behind at once either: guards kill what a process had started once it is gone
(`pipeline/launch/guard.py`).
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

_LIMIT_S = 14.0
"""Longer than all graces of workers and server together."""
_LEAVE_LIVE_LINE = b"\n\x1b[?25h"
"""A new line, and the cursor shown again."""


def end_by_signals(work: Callable[[], int]) -> int:
    """The exit code of `work`, or 128 + N when signal N, SIGINT or SIGTERM, ended it.

    The signals are taken until this process ends, so that it stays quiet in its last moments too.
    """
    end = _End()
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:  # of a job in a script's background
            signal.signal(number, end.take)
    try:
        code = work()
    except BaseException:
        if end.code is None:
            raise
        _say("stopped; the same command again goes on from what is committed")
        return end.code  # whatever the error was, it came of being ended
    finally:
        end.working = False
    return code if end.code is None or code == 0 else end.code


class _End:
    """Whether this process is being ended, and with which exit code."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.working = True

    def take(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        if self.code is not None or not self.working:
            _end_at_once(self.code or 128 + number, "stopped at once")
        self.code = 128 + number
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        _say(f"{name}: stopping in order, which may take 15 s; a second one stops at once")
        late = f"not in order within {_LIMIT_S:.0f} s, so stopped at once"
        clock = threading.Timer(_LIMIT_S, _end_at_once, (self.code, late))
        clock.daemon = True
        clock.start()
        raise KeyboardInterrupt


def _end_at_once(code: int, how: str) -> NoReturn:
    _say(f"{how}; the same command again goes on from what is committed")
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _LEAVE_LIVE_LINE)
    os._exit(code)


def _say(line: str) -> None:
    """Print a line: above the live display while there is one, which has sys.stderr then."""
    over_echo = "\r" if sys.stderr.isatty() else ""  # the terminal's "^C"
    with contextlib.suppress(OSError):  # Ctrl-C has ended the reader of the pipe too
        sys.stderr.write(f"{over_echo}{line}\n")
        sys.stderr.flush()
