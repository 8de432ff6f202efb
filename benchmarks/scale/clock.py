"""Simulated time for real code: parties are threads, and simulated time passes only in sleeps.

    party runs ── its sleep, or a request's charge ──► waits in the order of time ──► runs again

Only one party runs at a time. Simulated time does not advance while it runs, however long the
machine takes. Therefore a thousand workers that poll a store have the same timing as on a thousand
machines, and their requests per simulated second do not depend on the speed of this machine.
"""

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from pipeline import threads

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_STACK = 1 << 20


@dataclass
class _Party:
    """A thread of the simulation."""

    name: str
    work: Callable[[], None]
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    cpu_s: float = 0.0
    """Processor time of the party's thread that has already been charged as simulated time."""
    owed_s: float = 0.0
    """Time that helper threads' requests have taken since the party's last sleep; it is charged to
    the party."""


class _Pool:
    """The time that the items of a pool take; their requests overlap, but their work does not.

    An item takes the first free place in the pool. After its requests, it waits for the previous
    item's work and then computes, because all items share Python's lock and one processor. The
    order in which the real threads end on a busy machine therefore does not affect the result.
    """

    def __init__(self, places: int) -> None:
        self._free = [0.0] * places
        self._lock = threading.Lock()
        self.seconds = 0.0

    def add(self, asked_s: float, cpu_s: float) -> None:
        """Add an item with the time of its requests and its processor time, in seconds."""
        with self._lock:
            answered = heapq.heappop(self._free) + asked_s
            self.seconds = max(self.seconds, answered) + cpu_s
            heapq.heappush(self._free, self.seconds)


class Clock:
    """A clock of simulated seconds, which replaces the module `time` in code that waits."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = itertools.count()
        self._waiting: list[tuple[float, int, _Party]] = []
        self._yielded = threading.Semaphore(0)
        self._current: _Party | None = None
        self._of_thread = threading.local()
        self._failed: BaseException | None = None
        self._happened: set[str] = set()
        self._parked: dict[str, list[_Party]] = {}

    def add(self, name: str, work: Callable[[], None]) -> None:
        """Add a party that starts at the current simulated time."""
        heapq.heappush(self._waiting, (self.now, next(self._count), _Party(name, work)))

    def run(self) -> None:
        """Run all parties until they end.

        Raises the error of the first party that fails, or RuntimeError if parties wait for an
        event that no party triggers.
        """
        threading.stack_size(_STACK)
        begun: set[int] = set()
        while self._waiting and self._failed is None:
            at, _, party = heapq.heappop(self._waiting)
            if int(at) > int(self.now):
                print(f"simulated second {int(at)}, {len(self._waiting)} wait", flush=True)
            self.now = at
            self._current = party
            if id(party) in begun:
                party.turn.release()
            else:
                begun.add(id(party))
                threading.Thread(
                    target=self._body, args=(party,), name=party.name, daemon=True
                ).start()
            self._yielded.acquire()
        threading.stack_size(0)
        if self._failed is not None:
            raise self._failed
        if self._parked:
            raise RuntimeError(f"parties wait for events that never happen: {sorted(self._parked)}")

    def monotonic(self) -> float:
        """Return the simulated time, like time.monotonic."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Let simulated time pass: `seconds`, plus the processor time since the last sleep.

        The sleep of a helper thread (a thread that reads ahead) is charged to its party, and the
        sleep of a thread of `in_order` to its item.
        """
        if hasattr(self._of_thread, "asked_s"):
            self._of_thread.asked_s += seconds
            return
        party = getattr(self._of_thread, "party", None)
        if party is None:
            assert self._current is not None
            self._current.owed_s += seconds
            return
        used_s = time.thread_time()
        seconds += used_s - party.cpu_s + party.owed_s
        party.cpu_s, party.owed_s = used_s, 0.0
        heapq.heappush(self._waiting, (self.now + seconds, next(self._count), party))
        self._yielded.release()
        party.turn.acquire()

    def in_order(
        self,
        work: Callable[[_Item], _Result],
        items: Iterable[_Item],
        at_once: int = threads.AT_ONCE,
    ) -> Iterator[_Result]:
        """Call pipeline.threads.in_order, and charge the pool's time to the calling party.

        Args:
            work: Function to call with each item.
            items: Items in order.
            at_once: Number of items in parallel.

        Yields:
            The results in the order of the items.
        """
        pool, party = _Pool(at_once), self._of_thread.party

        def timed(item: _Item) -> _Result:
            self._of_thread.asked_s, began = 0.0, time.thread_time()
            try:
                return work(item)
            finally:
                pool.add(self._of_thread.asked_s, time.thread_time() - began)

        yield from threads.in_order(timed, items, at_once)
        party.owed_s += pool.seconds

    def wait(self, event: str) -> None:
        """Sleep until `happen` is called for an event; this replaces messages outside the store."""
        while event not in self._happened:
            party = self._of_thread.party
            self._parked.setdefault(event, []).append(party)
            self._yielded.release()
            party.turn.acquire()

    def happen(self, event: str) -> None:
        """Trigger an event: parties that wait for it, now or later, continue."""
        self._happened.add(event)
        for party in self._parked.pop(event, ()):
            heapq.heappush(self._waiting, (self.now, next(self._count), party))

    @property
    def party(self) -> str:
        """Name of the running party; empty if none runs."""
        return self._current.name if self._current else ""

    def _body(self, party: _Party) -> None:
        self._of_thread.party = party
        party.cpu_s = time.thread_time()
        try:
            party.work()
        except BaseException as error:  # noqa: BLE001 raised again by run
            self._failed = error
        self._yielded.release()
