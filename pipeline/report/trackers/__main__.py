"""The process of one tracker: it reads messages from standard input and answers each of them.

    ["wandb", {run}]                                                     (first; without an answer)
    {"kind": "step", "number": 3, "values": {...}, "again": false}       ──►    null
    {"kind": "validation", "number": 4, "values": {...}, "again": true}  ──►    "the error"
    the end of the input                                       ──►    the process closes the tracker

`again` marks a step or validation that an earlier start of the run may have sent. Each start sends
the newest steps and validations again, because an earlier flow may have been killed before they
arrived. The process skips those that the tracker already has. The tracker itself or
trackers/NAME.json in the run's folder provides the last step and the last policy version that
arrived. This record also counts the failed messages of all starts.
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.report.trackers.kinds import CLOSE_S, KINDS, TRACKERS, Kind, TrackedRun, Tracker
from pipeline.store.schemes import shown_uri


class Feed:
    """Passes messages to a tracker, which it opens at the first message."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self._open = partial(TRACKERS[name], run)
        self._path = Path(run.folder, "trackers", f"{name}.json")
        found = json.loads(self._path.read_text()) if self._path.exists() else {}
        empty = {"run": run.id, "last_step": None, "last_validation": None, "failures": 0}
        self._record: dict[str, Any] = found if found.get("run") == run.id else empty
        self._tracker: Tracker | None = None
        self._last: dict[Kind, int | None] = {}

    def take(self, message: dict[str, Any]) -> None:
        """Pass a message to the tracker.

        Raises the tracker's error. If the tracker cannot be opened, opening it is tried again with
        the next message.
        """
        if self._tracker is None:
            self._tracker = self._open()
            for each in KINDS:
                known = (self._tracker.last[each], self._record[f"last_{each}"])
                self._last[each] = max((n for n in known if n is not None), default=None)
        kind, number = message["kind"], message["number"]
        last = self._last[kind]
        if not message["again"] or (last is not None and number > last):
            self._tracker.log(kind, number, message["values"])
            self._last[kind] = number
            self._write_record(f"last_{kind}", number)

    def close(self) -> None:
        """Close the tracker, if it was opened."""
        if self._tracker is not None:
            self._tracker.close()

    def error_of(self, work: Callable[[], None]) -> str | None:
        """Call `work`, and return the text of its error; count the error in the machine's record.

        None means that there was no error.
        """
        try:
            work()
        except Exception as error:  # noqa: BLE001 - any error of a library; the flow shows it
            with contextlib.suppress(OSError):
                self._write_record("failures", self._record["failures"] + 1)
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {shown_uri(lines[0]) if lines else 'no message'}"
        return None

    def _write_record(self, name: str, value: int) -> None:
        self._record[name] = value
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self._record))
        part.replace(self._path)


def main() -> None:
    """Pass the messages that the module's docstring lists to a tracker, until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep the output of libraries separate from the answers
    threading.Thread(target=_limit_closing, daemon=True).start()
    name, run = json.loads(sys.stdin.readline())
    feed = Feed(name, TrackedRun(**run))
    with contextlib.suppress(BrokenPipeError):  # a killed flow does not read answers
        for line in sys.stdin:
            error = feed.error_of(partial(feed.take, json.loads(line)))
            answers.write(json.dumps(error) + "\n")
    error = feed.error_of(feed.close)
    with contextlib.suppress(BrokenPipeError):
        if error is not None:
            answers.write(json.dumps(f"while closing: {error}") + "\n")


def _limit_closing() -> None:
    """Have the kernel kill this process if it still runs CLOSE_S after the end of its input.

    The input ends with the run, or when the flow is killed. The library may hang in either case.
    """
    poll = select.poll()
    poll.register(0, 0)  # only the end of the input is reported
    poll.poll()
    signal.alarm(CLOSE_S)


if __name__ == "__main__":
    main()
