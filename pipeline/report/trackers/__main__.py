"""The process of one tracker: messages on standard input, an answer to each on standard output.

    {"tracker": "wandb", "run": {...}}                       first
    {"step": 3, "values": {...}, "again": false}      ──►    {"error": null}
    {"version": 4, "values": {...}}                   ──►    {"error": "ConnectionError: ..."}
    the end                                           ──►    the tracker is closed

`again`: a start of the run sends its newest steps once more, as the flow may have been killed
before they arrived; what is there already is not sent twice. The place itself knows the last step
there, or trackers/NAME.json in the run's folder does.
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
    """Gives messages to a tracker, which is opened with the first one it is wanted for."""

    def __init__(self, name: str, run: TrackedRun) -> None:
        self._name, self._run = name, run
        self._record = Path(run.folder, "trackers", f"{name}.json")
        self._tracker: Tracker | None = None
        self._last: int | None = None

    def take(self, message: dict[str, Any]) -> None:
        """Pass a message on. Raises what the tracker raises; the next message tries it anew."""
        if self._tracker is None:
            tracker = TRACKERS[self._name].make(self._run)
            self._last = self._known(tracker)
            self._tracker = tracker
        if "version" in message:
            self._tracker.log_validation(message["version"], message["values"])
        elif not message["again"] or (self._last is not None and message["step"] > self._last):
            self._tracker.log_step(message["step"], message["values"])
            self._last = message["step"]
            part = self._record.with_suffix(".part")
            part.write_text(json.dumps({"run": self._run.id, "last_step": self._last}))
            part.replace(self._record)

    def close(self) -> None:
        """Close the tracker, if it was opened."""
        if self._tracker is not None:
            self._tracker.close()

    def _known(self, tracker: Tracker) -> int | None:
        """The last step that the place has, as far as it or this machine knows."""
        found = json.loads(self._record.read_text()) if self._record.exists() else {}
        recorded = found.get("last_step") if found.get("run") == self._run.id else None
        known = [step for step in (tracker.last_step, recorded) if step is not None]
        return max(known, default=None)


def main() -> None:
    """Feed a tracker until the end of the messages; see the module's table."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    first = json.loads(sys.stdin.readline())
    feed = Feed(first["tracker"], TrackedRun(**first["run"]))
    messages: SimpleQueue[str | None] = SimpleQueue()
    threading.Thread(target=_read, args=(messages,), daemon=True).start()
    while (message := messages.get()) is not None:
        error = None
        try:
            feed.take(json.loads(message))
        except Exception as failure:  # noqa: BLE001 - of a library; answered, counted and shown
            error = _text(failure)
        _answer(answers, error)
    try:
        feed.close()
    except Exception as failure:  # noqa: BLE001 - as above
        _answer(answers, f"at its end: {_text(failure)}")


def _read(messages: SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        messages.put(line)
    # The run has ended, or its flow was killed. The kernel ends what does not end by itself.
    signal.alarm(CLOSE_S)
    messages.put(None)


def _answer(answers: IO[str], error: str | None) -> None:
    with contextlib.suppress(BrokenPipeError):  # the flow was killed: the rest arrives all the same
        answers.write(json.dumps({"error": error}) + "\n")


def _text(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {shown_uri(lines[0]) if lines else 'no message'}"


if __name__ == "__main__":
    main()
