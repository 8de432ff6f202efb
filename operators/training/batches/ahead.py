"""Loads the next step while the trainer works on the current one.

If the settings allow staleness, the next step may already be sealed. This module only reads the
store; it does not decide whether to train a step, because all ranks must make that decision
together.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

from operators.training.batches.step_data import StepData

_PAUSE_S = 0.5


class Ahead:
    """Loads the next step in a separate thread, before the trainer needs it."""

    def __init__(self, load: Callable[[int], StepData], is_sealed: Callable[[int], bool]) -> None:
        """Create the thread.

        Args:
            load: A function that loads a sealed step.
            is_sealed: A function that returns whether a step is already sealed.
        """
        self._load = load
        self._is_sealed = is_sealed
        self._thread = ThreadPoolExecutor(1, "next-step")
        self._next: tuple[int, Future[StepData | None]] | None = None
        self._wanted_now = Event()

    def prepare(self, step: int) -> None:
        """Load a step in the background as soon as the flow has sealed it."""
        self._wanted_now = Event()
        self._next = (step, self._thread.submit(self._load_when_sealed, step, self._wanted_now))

    def take(self, step: int) -> StepData:
        """Return the data for a sealed step. Raises the error if loading failed."""
        prepared, self._next = self._next, None
        self._wanted_now.set()
        if prepared is not None and prepared[0] == step:
            data = prepared[1].result()
            if data is not None:
                return data
        return self._load(step)

    def close(self) -> None:
        """Stop the thread and discard the prepared step."""
        self._wanted_now.set()
        self._thread.shutdown()
        if self._next is not None and self._next[1].exception() is None:
            data = self._next[1].result()
            if data is not None:
                data.close()

    def _load_when_sealed(self, step: int, wanted_now: Event) -> StepData | None:
        """Load a step once it is sealed.

        Returns None if `take` is called before that; `take` then loads the step itself.
        """
        while not self._is_sealed(step):
            if wanted_now.wait(_PAUSE_S):
                return None
        return self._load(step)
