"""What the Prefect UI shows of a run beside its log: progress, tables, texts, links.

Artifacts are for people. A separate thread makes them, so a server that is away neither fails nor
delays the run; of several versions that wait, only the last is made.
"""

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.exceptions import PrefectException


class Artifacts:
    """The artifacts of one run. Made in its flow, closed at its end."""

    def __init__(self, run: str, warn: Callable[[str], None]) -> None:
        """`warn` is called when the first artifact cannot be made."""
        self._run = run
        self._warn = warn
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="artifacts")
        self._waiting: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._progress: UUID | None = None
        self._percent = 0.0
        self._status = ""
        self._context = contextvars.copy_context()  # ties them to the flow run
        self.failures = 0

    def __enter__(self) -> "Artifacts":
        return self

    def __exit__(self, *_: object) -> None:
        self._maker.shutdown(wait=True)

    def progress(self, percent: float) -> None:
        """How far the run has come."""
        self._percent = percent
        self._later("progress", self._make_progress)

    def status(self, text: str) -> None:
        """What the run is doing, shown beside its progress."""
        self._status = text
        self._later("progress", self._make_progress)

    def table(self, name: str, rows: list[dict[str, Any]], description: str) -> None:
        """A table, in place of the one of this name. Prefect keeps the old ones too: bound it."""
        key = self._key(name)
        self._later(
            name, lambda: _done(create_table_artifact(rows, key=key, description=description))
        )

    def text(self, name: str, markdown: str) -> None:
        """A text, in place of the one of this name."""
        key = self._key(name)
        self._later(name, lambda: _done(create_markdown_artifact(markdown, key=key)))

    def link(self, name: str, uri: str) -> None:
        """A link, in place of the one of this name."""
        key = self._key(name)
        self._later(name, lambda: _done(create_link_artifact(uri, link_text=uri, key=key)))

    def _make_progress(self) -> None:
        percent, status = self._percent, self._status
        if self._progress is None:
            # The same function serves async flows, so by its type it may return a coroutine.
            made = create_progress_artifact(percent, key=self._key("progress"), description=status)
            self._progress = cast(UUID, made)
        else:
            update_progress_artifact(self._progress, percent, status)

    def _key(self, name: str) -> str:
        return f"{self._run}-{name}"

    def _later(self, name: str, make: Callable[[], None]) -> None:
        with self._lock:
            queued = name in self._waiting
            self._waiting[name] = make
        if not queued:
            self._maker.submit(self._context.run, self._make, name)

    def _make(self, name: str) -> None:
        with self._lock:
            make = self._waiting.pop(name)
        try:
            make()
        except (PrefectException, httpx.HTTPError, OSError, RuntimeError, ValueError) as error:
            self.failures += 1
            if self.failures == 1:
                self._warn(f"Prefect did not take an artifact, the run goes on: {error!r}")


def _done(_: object) -> None:
    """Drop a result that nobody needs."""
