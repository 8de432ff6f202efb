"""Waiting for expected events on a machine that may be busy.

A passing test waits no longer than necessary, so the long limit costs nothing. Tests use a shorter
limit only if they expect a failure, because the server that they contact does not exist.
"""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 300.0

T = TypeVar("T")


def eventually(
    look: Callable[[], T | None], what: Callable[[], object], within_s: float = PATIENCE_S
) -> T:
    """Call `look` until its result is neither None nor False.

    Args:
        look: The function to call.
        what: Returns a description of the awaited event, for the error message.
        within_s: Seconds until the wait fails with an AssertionError.

    Returns:
        The last result of `look`.
    """
    deadline_s = time.monotonic() + within_s
    while True:
        found = look()
        if found is not None and found is not False:
            return found
        assert time.monotonic() < deadline_s, f"not within {within_s:.0f} s: {what()}"
        time.sleep(0.3)
