"""The terminal while a run is going on: one live line, and one line per finished step."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from types import TracebackType

from rich.console import Console
from rich.status import Status

_WARNINGS_EVERY_S = 10.0


class Display:
    """Says what is happening. Safe to use from several threads.

    On a terminal the present phases are one live line with a clock; elsewhere (logs, CI) each new
    phase is a line of its own.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status = Status("starting", console=console)
        self._phases: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._lock = threading.Lock()
        self._started_s = time.monotonic()

    def __enter__(self) -> "Display":
        if self.console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._status.stop()

    def phase(self, who: str, what: str | None) -> None:
        """Say what a part of the run is doing now; None: nothing any more."""
        with self._lock:
            if what is None:
                self._phases.pop(who, None)
            else:
                self._phases[who] = what
            if self.console.is_terminal:
                text = " · ".join(f"{who}: {what}" for who, what in self._phases.items())
                self._status.update(f"{self._elapsed()} {text}")
            elif what is not None and self._said.get(who) != what:
                self._said[who] = what
                self.console.print(
                    f"{self._elapsed()} {who}: {what}", highlight=False, soft_wrap=True
                )

    def line(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self.console.print(f"{self._elapsed()} {text}", highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def warnings_of(self, logger: str) -> Iterator[None]:
        """Print a logger's warnings too, at most one in ten seconds: waits say so at each try."""
        handler = _Lines(self)
        logging.getLogger(logger).addHandler(handler)
        try:
            yield
        finally:
            logging.getLogger(logger).removeHandler(handler)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started_s), 60)
        return f"\\[{minutes:02d}:{seconds:02d}]"


class _Lines(logging.Handler):
    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display
        self._last_s = -_WARNINGS_EVERY_S

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= _WARNINGS_EVERY_S:
            self._last_s = now_s
            self._display.line(record.getMessage())
