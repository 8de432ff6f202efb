"""The handling of Ctrl-C and SIGTERM in a command that has started other processes.

    first signal    prints a line and raises KeyboardInterrupt, so that child processes end cleanly
    second signal   ends this process immediately, as does a timer if the clean end takes too long

Even an immediate end leaves no processes behind, because guards kill the children of a dead process
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
"""Seconds that a clean end may take: more than the sum of all grace periods of the workers and the
server."""
_LEAVE_LIVE_LINE = b"\n\x1b[?25h"
"""A line break, and the code that shows the cursor again."""


def end_by_signals(work: Callable[[], int]) -> int:
    """Call `work` and return its exit code, or 128 + N if signal N (SIGINT or SIGTERM) ended it.

    The handlers stay installed until this process ends, so late signals do not print tracebacks.
    """
    end = _End()
    for number in (signal.SIGINT, signal.SIGTERM):
        # A script's background job ignores SIGINT, and must continue to do so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end.take)
    try:
        code = work()
    except BaseException:
        if end.code is None:
            raise
        _say("stopped; the same command continues from the last commit")
        return end.code  # the signal caused the error
    finally:
        end.working = False
    return code if end.code is None or code == 0 else end.code


class _End:
    """The exit code of this process once a signal has arrived, and whether `work` still runs."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.working = True

    def take(self, number: int, _: FrameType | None) -> None:
        """Handle a signal."""
        if self.code is not None or not self.working:
            _end_at_once(self.code or 128 + number, "stopped immediately")
        self.code = 128 + number
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        _say(f"{name}: stopping cleanly (up to 15 s); a second signal stops immediately")
        late = f"no clean stop within {_LIMIT_S:.0f} s, so stopped immediately"
        clock = threading.Timer(_LIMIT_S, _end_at_once, (self.code, late))
        clock.daemon = True
        clock.start()
        raise KeyboardInterrupt


def _end_at_once(code: int, how: str) -> NoReturn:
    _say(f"{how}; the same command continues from the last commit")
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _LEAVE_LIVE_LINE)
    os._exit(code)


def _say(line: str) -> None:
    """Print a line. A live display, which replaces sys.stderr, shows the line above itself."""
    over_echo = "\r" if sys.stderr.isatty() else ""  # covers the terminal's "^C"
    with contextlib.suppress(OSError):  # Ctrl-C may have ended the program that reads the pipe
        sys.stderr.write(f"{over_echo}{line}\n")
        sys.stderr.flush()
