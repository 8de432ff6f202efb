"""The queue that passes exported tensors from the main thread to the thread that writes them."""

import threading
from collections import deque
from collections.abc import Callable, Iterator

_LOOK_S = 0.5
"""Seconds between a waiting thread's checks for a failure of the other thread."""


class TensorBuffer:
    """A queue, limited in size, that holds the bytes of tensors.

    One thread calls `reserve` and `put`; the other thread iterates over the queue.
    """

    def __init__(self, room: int, check: Callable[[], None]) -> None:
        """Create an empty queue.

        Args:
            room: The maximum number of bytes in the queue. A single tensor may be larger.
            check: Raises the error that ended the iterating thread.
        """
        self._room = room
        self._check = check
        self._changed = threading.Condition()
        self._waiting: deque[memoryview] = deque()
        self._held = 0
        self._dropped = False

    def reserve(self, size: int) -> None:
        """Wait until `size` bytes fit; 0 bytes always fit. Raises any error that `check` raises."""
        with self._changed:
            # The other thread takes no tensor after the last one, which therefore stays in the
            # queue. Without `size and`, a reservation of 0 bytes could then wait forever.
            while size and self._held and self._held + size > self._room:
                if not self._changed.wait(_LOOK_S):
                    self._check()

    def put(self, content: memoryview) -> None:
        """Append a tensor's bytes; the caller must have reserved space for them."""
        with self._changed:
            self._held += content.nbytes
            self._waiting.append(content)
            self._changed.notify_all()

    def drop(self) -> None:
        """End the iterating thread with an error, because no more tensors will follow."""
        with self._changed:
            self._dropped = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[memoryview]:
        """Yield tensors indefinitely. A tensor leaves the queue when the caller takes the next one.

        Raises RuntimeError after `drop`.
        """
        while True:
            with self._changed:
                while not (self._waiting or self._dropped):
                    self._changed.wait()
                if self._dropped:
                    raise RuntimeError("the export failed before its last tensor")
                content = self._waiting[0]
            yield content
            size = content.nbytes
            del content
            with self._changed:
                self._waiting.popleft()
                self._held -= size
                self._changed.notify_all()
