"""The flow's side of a run's tracker processes. The flow waits for them only when it ends."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pipeline.config.tree import RunConfig
from pipeline.metrics.metric import Metrics
from pipeline.report.folders import local_folder
from pipeline.report.trackers.kinds import CLOSE_S, TRACKERS, Kind, TrackedRun
from pipeline.run import keys
from pipeline.run.commit import read_commit, write_id_of
from pipeline.store import Store

_ENDED_S = 4
"""Like CLOSE_S, but for a stopped or failed run. It is shorter, because Ctrl-C must end a run
quickly."""
_SILENT_S = 120
"""Seconds without an answer after which the flow reports that a tracker hangs."""

Line = Callable[[str], None]


class TrackerProcess:
    """A tracker in a separate process, so that it cannot stop or delay the run."""

    def __init__(self, name: str, run: TrackedRun, line: Line) -> None:
        """Start the process.

        Args:
            name: The tracker's name in `trainer.logger`.
            run: The run, which the process passes to the tracker.
            line: Shows a line of text to users; called from several threads.
        """
        self.name = name
        self.sent = self.taken = self.failures = 0
        self.log_file = Path(run.folder, "trackers", f"{name}.log")
        self._line = line
        self._reason = ""
        self._messages: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
        self._process = _start(self.log_file)
        self._thread = threading.Thread(target=self._pass_on, args=(run,), daemon=True)
        self._thread.start()

    def log(self, kind: Kind, number: int, values: Metrics, again: bool = False) -> None:
        """Send the metrics of a step, or the results of a validation, without waiting.

        Args:
            kind: What the values belong to.
            number: The step or the policy version.
            values: The values; those that were not measured are not sent.
            again: Whether an earlier start of the run may already have sent them.
        """
        self.sent += 1
        measured = {name: value for name, value in values.items() if value is not None}
        self._messages.put({"kind": kind, "number": number, "values": measured, "again": again})

    def end(self) -> None:
        """Ask for the process's input to be closed after all queued messages; do not wait."""
        self._messages.put(None)

    def close(self, deadline_s: float) -> None:
        """Wait for the process to end, and report missing metrics.

        A process that does not end by the deadline is killed. `deadline_s` is a time on the clock
        of time.monotonic().
        """
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._reason = self._reason or "it did not end in time"
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._thread.join(1.0)
        if lost := self.sent - self.taken:
            self._line(
                f"{self.name} lacks {lost} of {self.sent} steps and validations "
                f"({self._reason or 'it ended early'}; its log is {self.log_file}); "
                "the store has all of them"
            )

    def _pass_on(self, run: TrackedRun) -> None:
        """Pass one message after the other to the process, and take its answers."""
        messages, answers = self._process.stdin, self._process.stdout
        assert messages is not None
        assert answers is not None
        answered = select.poll()
        answered.register(answers, select.POLLIN)
        with contextlib.suppress(BrokenPipeError), messages:
            messages.write(json.dumps([self.name, asdict(run)]) + "\n")
            for message in iter(self._messages.get, None):
                messages.write(json.dumps(message) + "\n")
                messages.flush()
                if not answered.poll(_SILENT_S * 1000):
                    self._line(f"{self.name} has not answered for {_SILENT_S} s; the run continues")
                if not (answer := answers.readline()):
                    return  # the process has ended
                self._take(json.loads(answer))
        for answer in answers:  # an error while closing
            self._take(json.loads(answer))

    def _take(self, error: str | None) -> None:
        if error is None:
            self.taken += 1
            return
        self.failures += 1
        self._reason = error
        if self.failures == 1:
            self._line(f"{self.name} could not record metrics; the run continues: {error}")


def _start(log: Path) -> "subprocess.Popen[str]":
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        return subprocess.Popen(
            (sys.executable, "-m", "pipeline.report.trackers"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            env=os.environ | {"PYTHONSAFEPATH": "1"},
            start_new_session=True,  # a terminal's Ctrl-C then reaches only the flow
        )


@contextlib.contextmanager
def trackers_of(
    config: RunConfig, store: Store, line: Line
) -> Iterator[tuple[TrackerProcess, ...]]:
    """Provide the trackers that `trainer.logger` selects, and close them after the block.

    Closing takes at most CLOSE_S if the block ends normally, and at most _ENDED_S after an error.

    Args:
        config: The run's settings.
        store: The run's store.
        line: Shows a line of text to users; called from several threads.
    """
    names = [name for name in dict.fromkeys(config.trainer.logger) if name in TRACKERS]
    if not names:
        yield ()
        return
    run = _tracked_run(config, store)
    trackers = tuple(TrackerProcess(name, run, line) for name in names)
    grace_s = _ENDED_S
    try:
        yield trackers
        grace_s = CLOSE_S
    finally:
        for tracker in trackers:
            tracker.end()
        deadline_s = time.monotonic() + grace_s
        for tracker in trackers:
            tracker.close(deadline_s)


def _tracked_run(config: RunConfig, store: Store) -> TrackedRun:
    """Return the run's description for trackers, with an id that is the same for every start."""
    trainer = config.trainer
    made_by = write_id_of(read_commit(store, keys.run_json()))
    return TrackedRun(
        id=f"{trainer.run_name}-{made_by}",
        name=trainer.experiment_name,
        project=trainer.project_name,
        folder=str(local_folder(config)),
        settings=config.model_dump(mode="json"),
    )
