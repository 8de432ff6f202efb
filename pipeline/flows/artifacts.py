"""Artifacts of a run (progress, tables, texts, links), which Prefect's UI shows with the log.

Artifacts are only for users. A separate thread creates them, so an outage of the server neither
stops nor delays the run. If several versions of an artifact are pending, only the last one is
created.
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
    """The artifacts of one run. Its flow creates this object and closes it at the end."""

    def __init__(self, run: str, warn: Callable[[str], None]) -> None:
        """Prepare the artifacts of `run`. `warn` is called once if any of them cannot be shown."""
        self._run = run
        self._warn = warn
        self._maker = ThreadPoolExecutor(1, thread_name_prefix="artifacts")
        self._waiting: dict[str, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._progress: UUID | None = None
        self._percent = 0.0
        self._status = ""
        self._context = contextvars.copy_context()  # links the artifacts to the flow run
        self.failures = 0

    def __enter__(self) -> "Artifacts":
        return self

    def __exit__(self, *_: object) -> None:
        self._maker.shutdown(wait=True)

    def progress(self, percent: float) -> None:
        """Show the run's progress in percent."""
        self._percent = percent
        self._later("progress", self._make_progress)

    def status(self, text: str) -> None:
        """Show the run's current activity next to its progress."""
        self._status = text
        self._later("progress", self._make_progress)

    def table(self, name: str, rows: list[dict[str, Any]], description: str) -> None:
        """Show a table in place of the previous table with this name.

        Prefect also stores all previous tables, so the caller must limit the number of rows.

        Args:
            name: The table's name within the run.
            rows: The cells of each row, keyed by column.
            description: The text above the table, as Markdown.
        """
        key = self._key(name)
        self._later(
            name, lambda: _done(create_table_artifact(rows, key=key, description=description))
        )

    def text(self, name: str, markdown: str) -> None:
        """Show a text in place of the previous text with this name."""
        key = self._key(name)
        self._later(name, lambda: _done(create_markdown_artifact(markdown, key=key)))

    def link(self, name: str, uri: str) -> None:
        """Show a link in place of the previous link with this name."""
        key = self._key(name)
        self._later(name, lambda: _done(create_link_artifact(uri, link_text=uri, key=key)))

    def _make_progress(self) -> None:
        percent, status = self._percent, self._status
        if self._progress is None:
            # The declared return type includes a coroutine, for calls in async flows.
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
                self._warn(f"Prefect did not accept an artifact; the run continues: {error!r}")


def _done(_: object) -> None:
    """Discard a result that is not needed."""
