"""The current activity of a worker, for the display of a run on this machine.

The launcher gives each worker the name of a file. The worker replaces the file's content, and the
display reads it. Progress is not part of the run: it is never written to the store, and a worker
that was given no file name does not write it at all.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

log = logging.getLogger(__name__)

_FILE = "RETRACE_PROGRESS_FILE"
_EVERY_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """The activity of a worker, as one line of the display.

    Example: Progress('step 3 shard 0: generating', 1793345022.5, 37, 64, 'samples', 5120.0).
    """

    what: str
    started_s: float
    """The value of time.time() when this activity began."""
    finished: int = 0
    total: int = 0
    """The number of units to do; 0 if the activity has none."""
    unit: str = ""
    """The unit of `finished` and `total`."""
    tokens_per_s: float | None = None
    """The mean rate since the beginning; None if the activity generates no tokens."""

    @property
    def text(self) -> str:
        """The displayed text: 'step 3 shard 0: generating, 37 of 64 samples, 5,120 tokens/s'."""
        counted = f", {self.finished:,} of {self.total:,} {self.unit}" if self.total else ""
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} tokens/s"
        return f"{self.what}{counted}{speed}"


class _Own:
    """The activity of this process."""

    progress = Progress("starting", 0.0)
    written_s = 0.0
    """The value of time.monotonic() at the last write."""
    failed = False


def say(what: str, total: int = 0, unit: str = "") -> None:
    """Report a new activity of this worker. An error while writing is only logged.

    Args:
        what: The activity.
        total: The number of units to do; 0 if the activity has none.
        unit: The unit of `total`, in the plural.
    """
    _Own.progress = Progress(what, time.time(), 0, total, unit)
    _write_own()


def count(finished: int, tokens: Callable[[], int] | None = None) -> None:
    """Report how many units are finished; `tokens` returns the number of tokens so far.

    The function may be called often, because it calls `tokens` and writes at most twice a second.
    """
    if _path() is None or time.monotonic() - _Own.written_s < _EVERY_S:
        return
    now = replace(_Own.progress, finished=finished)
    if tokens is not None:
        seconds = max(time.time() - now.started_s, 1e-3)
        now = replace(now, tokens_per_s=tokens() / seconds)
    _Own.progress = now
    _write_own()


def counted(items: Iterable[T]) -> Iterator[T]:
    """Yield each item, and report how many are finished."""
    for finished, item in enumerate(items, start=1):
        yield item
        count(finished)


def environment(path: Path) -> dict[str, str]:
    """Return the environment variable that makes a worker write its progress to `path`.

    Until the worker reports its first activity, `path` contains the activity "starting".
    """
    _write(path, Progress("starting", time.time()))
    return {_FILE: str(path)}


def read_progress(path: Path) -> Progress:
    """Read the activity of a worker. Raises FileNotFoundError."""
    return Progress(**json.loads(path.read_text()))


def _path() -> Path | None:
    """Return the file to write, or None if no file is set.

    Of the training ranks, only rank 0 writes.
    """
    named = os.environ.get(_FILE)
    return None if named is None or os.environ.get("RANK", "0") != "0" else Path(named)


def _write_own() -> None:
    path = _path()
    if path is None or _Own.failed:
        return
    _Own.written_s = time.monotonic()
    _Own.failed = not _write(path, _Own.progress)


def _write(path: Path, progress: Progress) -> bool:
    """Write the file and return whether this succeeded; a failure must not end the run."""
    # Rename a complete file, so that the display never reads half a line.
    whole = path.with_suffix(".new")
    try:
        whole.write_text(json.dumps(asdict(progress)))
        whole.replace(path)
    except OSError as error:
        log.warning("the progress of this worker cannot be displayed: %s", error)
        return False
    return True
