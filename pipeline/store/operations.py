"""The store operations in progress in this process, so that a message can name a hanging one.

A file system that does not respond blocks the calling thread. The call cannot be interrupted and
never raises an exception. Another thread can look up the operation here (operators/hanging.py).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_begun: dict[object, tuple[float, str]] = {}


@contextmanager
def operation(what: str) -> Iterator[None]:
    """Register an operation for the duration of the block.

    Example of `what`: 'read run.json in file:///runs/a'.
    """
    token = object()
    _begun[token] = (time.monotonic(), what)
    try:
        yield
    finally:
        del _begun[token]


def oldest_operation() -> tuple[str, float] | None:
    """Return the longest-running operation and its duration in seconds; None if none is running."""
    began_s, what = min(tuple(_begun.values()), default=(0.0, ""))
    return (what, time.monotonic() - began_s) if what else None
