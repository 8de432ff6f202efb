"""Waiting for what must come, on a machine that may be busy with something else.

A test that succeeds waits no longer than it must, so the limit costs nothing. Only the failure of a
server that is certainly absent is awaited for a shorter time.
"""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 300.0

T = TypeVar("T")


def eventually(
    look: Callable[[], T | None], what: Callable[[], object], within_s: float = PATIENCE_S
) -> T:
    """The first result that is neither None nor False; AssertionError with `what` after a while."""
    deadline_s = time.monotonic() + within_s
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        assert time.monotonic() < deadline_s, f"not within {within_s:.0f} s: {what()}"
        time.sleep(0.3)
