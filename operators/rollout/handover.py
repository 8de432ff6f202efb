"""A queue with a size limit in bytes, which passes finished work to one background thread.

    engine's thread: put(item) ──► queue, at most `limit_bytes` ──► work(item), one after another

The engine runs in this process (vllm_environment.py), so both threads share Python's global
interpreter lock. Array operations, zstd compression, digests and socket calls release this lock.
"""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class Handover(Generic[Item]):
    """A context manager that runs `work` in a separate thread, one item at a time, in order.

    If `work` raises an exception, the next `put` or `finish` raises it again. If an exception
    leaves the `with` block, the item in progress is finished and the waiting items are dropped.
    """

    blocked_s: float
    """Seconds that `put` has waited because the pending items had reached the limit."""

    def __init__(self, work: Callable[[Item], None], limit_bytes: int, name: str) -> None:
        self.blocked_s = 0.0
        self._work = work
        self._limit = limit_bytes
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._pending: deque[tuple[Future[None], int]] = deque()
        self._held = 0

    @property
    def held_bytes(self) -> int:
        """The size in bytes of all waiting items and the item in progress, as of the last `put`."""
        return self._held

    def put(self, item: Item, size: int) -> None:
        """Pass an item of `size` bytes to the thread.

        Waits while this item and the earlier ones together exceed the limit. An item larger than
        the limit waits until all others are done. Raises any exception that `work` raised for an
        earlier item.
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
        """Wait until all items are done. Raises any exception that `work` raised for an item."""
        while self._pending:
            self._take()

    def _take(self) -> None:
        """Wait for the oldest item, which finishes first because there is only one thread."""
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
