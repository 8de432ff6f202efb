"""Displays of a run's current activity, on a terminal or in a log."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from pipeline.progress import Progress, read_progress
from pipeline.scratch import scratch_folder

_WARNINGS_EVERY_S = 10.0
_REFRESHES_PER_S = 4
_BAR_WIDTH = 12


class LogDisplay:
    """A display that writes to a log: each new phase becomes a line.

    Several threads may use it at the same time.
    """

    def __init__(self, log: Callable[[str], None], show: Callable[[str], None]) -> None:
        """Create a display that has no phases yet.

        Args:
            log: Called with each new line.
            show: Called with the text of all current phases whenever one of them changes.
        """
        self._log = log
        self._show = show
        # Replaced and never changed in place, because other threads read the dict.
        self._phases: dict[str, str] = {}
        self._last_shown: dict[str, str] = {}
        self._lock = threading.Lock()

    def phase(self, who: str, what: str | None) -> None:
        """Show the current activity of a part of the run.

        Args:
            who: The part. Example: 'rollout'.
            what: The activity; None if the part has finished.
        """
        with self._lock:
            if what is None:
                self._phases = {name: text for name, text in self._phases.items() if name != who}
            else:
                self._phases = {**self._phases, who: what}
                if self._last_shown.get(who) != what:
                    self._last_shown[who] = what
                    self._log(f"{who}: {what}")
            text = " · ".join(f"{who}: {what}" for who, what in self._phases.items())
        self._show(text)

    def step(self, step: int, total: int) -> None:
        """Show that a step begins; the run has `total` steps."""
        self.phase("run", f"step {step} of {total}")

    def line(self, text: str) -> None:
        """Log a line."""
        self._log(text)


class Display(LogDisplay):
    """The display of a run on this machine.

    A terminal shows the current phases and each worker's activity live, below the permanent lines.
    Elsewhere (logs, CI, NO_COLOR, TERM=dumb), a line is printed for each new phase.
    """

    progress_folder: Path | None = None
    """The folder to which each worker writes its progress, as NAME.json; None if progress is not
    shown."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._is_live = console.is_interactive and not console.no_color
        super().__init__(_nothing if self._is_live else self.line, _nothing)
        self._spinner = Spinner("dots")
        self._started_s = time.monotonic()
        self._pace = Pace()
        self._open = contextlib.ExitStack()

    def __enter__(self) -> "Display":
        if self._is_live:
            self.progress_folder = self._open.enter_context(scratch_folder("progress"))
            live = Live(
                self, console=self.console, refresh_per_second=_REFRESHES_PER_S, transient=True
            )
            self._open.enter_context(live)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def step(self, step: int, total: int) -> None:
        """Show that a step begins; the run has `total` steps."""
        self._pace.begin(total - step, time.monotonic())
        super().step(step, total)

    def line(self, text: str) -> None:
        """Print a permanent line."""
        self.console.print(
            f"[{_clock(self._elapsed_s())}] {text}", markup=False, highlight=False, soft_wrap=True
        )

    def __rich__(self) -> RenderableType:
        """Return the live part of the display."""
        return Group(self._head(), self._workers())

    def _head(self) -> RenderableType:
        phases = dict(self._phases)
        run = phases.pop("run", None)
        parts = [f"{who}: {what}" for who, what in phases.items()]
        if run is not None:
            left_s = self._pace.left_s(time.monotonic())
            parts.insert(0, run if left_s is None else f"{run}, about {_clock(left_s)} left")
        self._spinner.update(text=Text(f"[{_clock(self._elapsed_s())}] {' · '.join(parts)}"))
        return self._spinner

    def _workers(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(no_wrap=True, style="bold")
        table.add_column()
        table.add_column(width=_BAR_WIDTH)
        table.add_column(justify="right", no_wrap=True)
        for name, progress in self._of_workers():
            bar: RenderableType = ""
            if progress.total:
                bar = ProgressBar(progress.total, progress.finished, _BAR_WIDTH)
            since = _clock(time.time() - progress.started_s)
            table.add_row(name, Text(progress.text), bar, since)
        return table

    def _of_workers(self) -> list[tuple[str, Progress]]:
        if self.progress_folder is None:
            return []
        files = sorted(self.progress_folder.glob("*.json"), key=lambda path: _sort_key(path.stem))
        return [(path.stem, read_progress(path)) for path in files]

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started_s


class Pace:
    """An estimate of a run's remaining time, from the steps finished since the flow started."""

    def __init__(self) -> None:
        self._begun_s: list[float] = []
        self._remaining = 0

    def begin(self, remaining: int, now_s: float) -> None:
        """Record that a step begins.

        Args:
            remaining: The number of steps to finish, including this one.
            now_s: The current time, as time.monotonic() returns it.
        """
        self._begun_s = [*self._begun_s, now_s]
        self._remaining = remaining

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds until the last step ends; None if no step has been finished yet."""
        # The first step includes the start of the engines, so it counts only while no other step is
        # finished.
        begun_s = self._begun_s[1:] if len(self._begun_s) > 2 else self._begun_s
        if len(begun_s) < 2:
            return None
        mean_s = (begun_s[-1] - begun_s[0]) / (len(begun_s) - 1)
        return max(0.0, mean_s - (now_s - begun_s[-1])) + mean_s * (self._remaining - 1)


def _nothing(text: str) -> None:
    """Ignore a text."""


def _clock(seconds: float) -> str:
    """Return minutes and seconds. Example: '03:12'."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    return f"{minutes:02d}:{rest:02d}"


def _sort_key(name: str) -> tuple[str, int]:
    """Return a sort key that puts rollout-10 after rollout-2."""
    stage, _, index = name.rpartition("-")
    return stage, int(index)


@contextlib.contextmanager
def warnings_of(logger: str, line: Callable[[str], None]) -> Iterator[None]:
    """Show a logger's warnings, but at most one every ten seconds, because every retry logs one.

    Args:
        logger: The name of the logger.
        line: Called with the text of each shown warning.
    """
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
