"""The hand-over of finished work to one background thread, bounded by bytes.

    engine's thread: put(item) ──► queue, at most `limit_bytes` ──► work(item), one after the other

The engine runs in this process (vllm_environment.py), so both threads share Python's global lock.
What `work` does with arrays, zstd, digests and sockets runs without that lock.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Handover(Generic[Item]):
    """A context manager that runs `work` in a thread of its own, one item at a time, in order.

    The next `put`, or `finish`, raises what `work` raised. Leaving the block by an exception drops
    the waiting items; the item in progress is finished first.
    """

    blocked_s: float
    """Seconds that `put` has waited for room, because items are made faster than `work` runs."""

    def __init__(self, work: Callable[[Item], None], limit_bytes: int, name: str) -> None:
        self.blocked_s = 0.0
        self._work = work
        self._limit = limit_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the items that wait or are in progress, as of the last `put`."""
        return self._held

    def put(self, item: Item, size: int) -> None:
        """Hand over an item of `size` bytes; wait while it and those before exceed the limit.

        An item larger than the limit is handed over alone. Raises what `work` raised.
        """
        while self._pending and self._pending[0][0].done():
            self._take()
        while self._pending and self._held + size > self._limit:
            started = time.monotonic()
            self._take()
            self.blocked_s += time.monotonic() - started
        self._held += size
        self._pending.append((self._thread.submit(self._work, item), size))

    def finish(self) -> None:
        """Wait until all items are done. Raises what `work` raised."""
        while self._pending:
            self._take()

    def _take(self) -> None:
        """Wait for the oldest item: with one thread it is the first to be done."""
        future, size = self._pending.popleft()
        future.result()
        self._held -= size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
