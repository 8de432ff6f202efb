"""The process of one tracker: it reads messages from standard input and answers each of them.

    {"tracker": "wandb", "run": {...}}                       (first; without an answer)
    {"step": 3, "values": {...}, "again": false}      ──►    {"error": null}
    {"version": 4, "values": {...}, "again": true}    ──►    {"error": "ConnectionError: ..."}
    the end of the input                              ──►    the process closes the tracker

`again` marks a step or validation that an earlier start of the run may have sent. Each start sends
the newest steps and validations again, because an earlier flow may have been killed before they
arrived. The process skips those that the tracker already has. The tracker itself or
trackers/NAME.json in the run's folder provides the last step and the last policy version that
arrived. This record also counts the failed messages of all starts.
"""

import contextlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from pipeline.report.trackers.kinds import CLOSE_S, TRACKERS, TrackedRun, Tracker
from pipeline.store.schemes import shown_uri


class Feed:
    """Passes messages to a tracker, which it opens at the first message."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self._name, self._run = name, run
        self._record = Path(run.folder, "trackers", f"{name}.json")
        self._tracker: Tracker | None = None
        self._last_step: int | None = None
        self._last_validation: int | None = None

    def take(self, message: dict[str, Any]) -> None:
        """Pass a message to the tracker.

        Raises the tracker's error. If the tracker cannot be opened, opening it is tried again with
        the next message.
        """
        if self._tracker is None:
            tracker = TRACKERS[self._name].make(self._run)
            found = self._read_record()
            self._last_step = _newest(tracker.last_step, found["last_step"])
            self._last_validation = _newest(tracker.last_validation, found["last_validation"])
            self._tracker = tracker
        if "version" in message:
            if _is_new(message["version"], self._last_validation, message["again"]):
                self._tracker.log_validation(message["version"], message["values"])
                self._last_validation = message["version"]
                self._write_record(last_validation=self._last_validation)
        elif _is_new(message["step"], self._last_step, message["again"]):
            self._tracker.log_step(message["step"], message["values"])
            self._last_step = message["step"]
            self._write_record(last_step=self._last_step)

    def close(self) -> None:
        """Close the tracker, if it was opened."""
        if self._tracker is not None:
            self._tracker.close()

    def count_failure(self) -> None:
        """Count a failed message in this machine's record, unless the record itself fails."""
        with contextlib.suppress(OSError, ValueError):
            self._write_record(failures=self._read_record()["failures"] + 1)

    def _read_record(self) -> dict[str, Any]:
        """Return this machine's record of the run; an empty one if there is none."""
        found = json.loads(self._record.read_text()) if self._record.exists() else {}
        last = {"last_step": None, "last_validation": None}
        empty = {"run": self._run.id, **last, "failures": 0}
        return empty | (found if found.get("run") == self._run.id else {})

    def _write_record(self, **changes: int | None) -> None:
        part = self._record.with_suffix(".part")
        part.write_text(json.dumps(self._read_record() | changes))
        part.replace(self._record)


def _is_new(number: int, last: int | None, again: bool) -> bool:
    return not again or (last is not None and number > last)


def _newest(*numbers: int | None) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def main() -> None:
    """Pass the messages that the module's docstring lists to a tracker, until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # keep the output of libraries separate from the answers
    first = json.loads(sys.stdin.readline())
    feed = Feed(first["tracker"], TrackedRun(**first["run"]))
    messages: SimpleQueue[str | None] = SimpleQueue()
    threading.Thread(target=_read, args=(messages,), daemon=True).start()
    while (message := messages.get()) is not None:
        error = None
        try:
            feed.take(json.loads(message))
        except Exception as failure:  # noqa: BLE001 - any error of a library; the flow shows it
            error = _text(failure)
            feed.count_failure()
        _answer(answers, error)
    try:
        feed.close()
    except Exception as failure:  # noqa: BLE001 - as above
        feed.count_failure()
        _answer(answers, f"while closing: {_text(failure)}")


def _read(messages: SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        messages.put(line)
    # The run has ended, or its flow was killed. The alarm kills this process if closing hangs.
    signal.alarm(CLOSE_S)
    messages.put(None)


def _answer(answers: IO[str], error: str | None) -> None:
    with contextlib.suppress(BrokenPipeError):  # a killed flow does not read answers
        answers.write(json.dumps({"error": error}) + "\n")


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {shown_uri(lines[0]) if lines else 'no message'}"


if __name__ == "__main__":
    main()
