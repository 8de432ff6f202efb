"""What a worker does now, for the display of a run on this machine.

The launcher gives each worker the name of a file; the worker replaces its content, and the display
reads it. It is no part of the run: without such a name a worker says nothing, and the store sees
none of it.
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
    """One line about a worker.

    Example: Progress('step 3 shard 0: generating', 1793345022.5, 37, 64, 'samples', 5120.0).
    """

    what: str
    started_s: float
    """time.time() at which it began that."""
    finished: int = 0
    total: int = 0
    """0: there is nothing to count."""
    unit: str = ""
    """Of `finished` and `total`."""
    tokens_per_s: float | None = None
    """Since it began; None: it makes no tokens."""

    @property
    def text(self) -> str:
        """For people. Example: 'step 3 shard 0: generating, 37 of 64 samples, 5,120 tokens/s'."""
        counted = f", {self.finished:,} of {self.total:,} {self.unit}" if self.total else ""
        speed = "" if self.tokens_per_s is None else f", {self.tokens_per_s:,.0f} tokens/s"
        return f"{self.what}{counted}{speed}"


class _Own:
    """What this process does."""

    progress = Progress("starting", 0.0)
    written_s = 0.0
    """time.monotonic() of the last write."""
    failed = False


def say(what: str, total: int = 0, unit: str = "") -> None:
    """Say what this worker does from now on, and how many `unit` it has to do; cannot fail."""
    _Own.progress = Progress(what, time.time(), 0, total, unit)
    _write_own()


def count(finished: int, tokens: Callable[[], int] | None = None) -> None:
    """Say how much of that is finished; `tokens` counts those made so far.

    It may be called very often: it writes, and asks for tokens, twice a second.
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
    """Yield each item, and say how many are finished."""
    for finished, item in enumerate(items, start=1):
        yield item
        count(finished)


def environment(path: Path) -> dict[str, str]:
    """What a worker's environment needs so that it says in `path` what it does.

    Until it does, `path` says that it is starting.
    """
    _write(path, Progress("starting", time.time()))
    return {_FILE: str(path)}


def read_progress(path: Path) -> Progress:
    """What a worker does. Raises FileNotFoundError."""
    return Progress(**json.loads(path.read_text()))


def _path() -> Path | None:
    """None: nobody wants to know. Of training ranks, the first speaks for all."""
    named = os.environ.get(_FILE)
    return None if named is None or os.environ.get("RANK", "0") != "0" else Path(named)


def _write_own() -> None:
    path = _path()
    if path is None or _Own.failed:
        return
    _Own.written_s = time.monotonic()
    _Own.failed = not _write(path, _Own.progress)


def _write(path: Path, progress: Progress) -> bool:
    """Whether that worked: a display that lags behind is no reason to end a run."""
    # A rename, so that the display never reads half a line.
    whole = path.with_suffix(".new")
    try:
        whole.write_text(json.dumps(asdict(progress)))
        whole.replace(path)
    except OSError as error:
        log.warning("the display is not told what a worker does: %s", error)
        return False
    return True
