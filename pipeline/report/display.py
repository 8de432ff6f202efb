"""What a run is doing, for people: on a terminal, or in a log."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType

from rich.console import Console
from rich.status import Status

_WARNINGS_EVERY_S = 10.0


class Display:
    """Shows what is happening. Safe to use from several threads.

    On a terminal the present phases are one live line with a clock; elsewhere (logs, CI) each new
    phase is a separate line.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._status = Status("starting", console=console)
        self._phases: dict[str, str] = {}
        self._last_shown: dict[str, str] = {}
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
        """Show what a part of the run is doing now; None: it has finished."""
        with self._lock:
            if what is None:
                self._phases.pop(who, None)
            else:
                self._phases[who] = what
            if self.console.is_terminal:
                text = " · ".join(f"{who}: {what}" for who, what in self._phases.items())
                self._status.update(f"{self._elapsed()} {text}")
            elif what is not None and self._last_shown.get(who) != what:
                self._last_shown[who] = what
                self.console.print(
                    f"{self._elapsed()} {who}: {what}", highlight=False, soft_wrap=True
                )

    def line(self, text: str) -> None:
        """Print a line that stays."""
        with self._lock:
            self.console.print(f"{self._elapsed()} {text}", highlight=False, soft_wrap=True)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started_s), 60)
        return f"\\[{minutes:02d}:{seconds:02d}]"


class LogDisplay:
    """The same for a run whose screen is a log: each new phase is a line. Safe to use from several
    threads."""

    def __init__(self, log: Callable[[str], None], show: Callable[[str], None]) -> None:
        """`log` takes lines; `show` takes all present phases whenever one changes."""
        self._log = log
        self._show = show
        self._phases: dict[str, str] = {}
        self._last_shown: dict[str, str] = {}
        self._lock = threading.Lock()

    def phase(self, who: str, what: str | None) -> None:
        """Show what a part of the run is doing now; None: it has finished."""
        with self._lock:
            if what is None:
                self._phases.pop(who, None)
            else:
                self._phases[who] = what
                if self._last_shown.get(who) != what:
                    self._last_shown[who] = what
                    self._log(f"{who}: {what}")
            text = " · ".join(f"{who}: {what}" for who, what in self._phases.items())
        self._show(text)

    def line(self, text: str) -> None:
        """Show that something happened."""
        self._log(text)


@contextlib.contextmanager
def warnings_of(logger: str, line: Callable[[str], None]) -> Iterator[None]:
    """Show a logger's warnings too, at most one in ten seconds: a wait warns at each try."""
    handler = _Lines(line)
    logging.getLogger(logger).addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger(logger).removeHandler(handler)


class _Lines(logging.Handler):
    def __init__(self, line: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._line = line
        self._last_s = -_WARNINGS_EVERY_S

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= _WARNINGS_EVERY_S:
            self._last_s = now_s
            self._line(record.getMessage())
