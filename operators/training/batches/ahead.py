"""Preparation of the next step while this one is trained; with staleness it may be sealed already.

This module only reads the store. Elsewhere, the ranks decide together whether a step is trained.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from operators.training.batches.step_data import StepData

_PAUSE_S = 0.5


class Ahead:
    """Loads steps, the next one ahead in a thread of its own.

    `load` reads a sealed step; `is_sealed` returns whether a step is sealed yet.
    """

    def __init__(self, load: Callable[[int], StepData], is_sealed: Callable[[int], bool]) -> None:
        self._load = load
        self._is_sealed = is_sealed
        self._thread = ThreadPoolExecutor(1, "next-step")
        self._next: tuple[int, Future[StepData | None]] | None = None
        self._wanted_now = Event()

    def prepare(self, step: int) -> None:
        """Start loading a step as soon as it is sealed."""
        self._wanted_now = Event()
        self._next = (step, self._thread.submit(self._load_when_sealed, step, self._wanted_now))

    def take(self, step: int) -> StepData:
        """Return a sealed step; raises what loading it raised."""
        prepared, self._next = self._next, None
        self._wanted_now.set()
        if prepared is not None and prepared[0] == step:
            data = prepared[1].result()
            if data is not None:
                return data
        return self._load(step)

    def close(self) -> None:
        """Discard what is prepared."""
        self._wanted_now.set()
        self._thread.shutdown()
        if self._next is not None and self._next[1].exception() is None:
            data = self._next[1].result()
            if data is not None:
                data.close()

    def _load_when_sealed(self, step: int, wanted_now: Event) -> StepData | None:
        """Load a step once it is sealed; None if `take` is called first, which then loads it."""
        while not self._is_sealed(step):
            if wanted_now.wait(_PAUSE_S):
                return None
        return self._load(step)
