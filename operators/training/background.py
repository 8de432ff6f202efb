"""Work that a training rank does in the background during the next step: uploads and commits.

A thread runs jobs in the order of submission, so a step's policy is committed before its metrics.
Jobs may use only the store and local files, because process groups and the model belong to the main
thread.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Self, TypeVar

from pipeline import progress

_LOOK_S = 0.5
"""Seconds between a waiting thread's checks for a failure of an earlier job."""

_T = TypeVar("_T")
_Job = tuple[Callable[[], None], Future[None]]


class Background:
    """A context manager that runs the background thread.

    After an exception in its `with` block, the manager does not wait for jobs. Waiting for an
    upload, or for a rank that also failed, would delay the error. The process is about to end, and
    its unfinished work in the store is debris, as after a kill.
    """

    def __init__(self, name: str = "background") -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._pending: deque[tuple[str, Future[None]]] = deque()
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, what: str, job: Callable[[], None]) -> Future[None]:
        """Run a job after all earlier ones, and return its future.

        `what` describes the job to users who watch the progress, for example "uploading policy 3".
        After a job has failed, later jobs do not run. Raises the error of an earlier job.
        """
        self.check()
        done: Future[None] = Future()
        self._pending.append((what, done))
        self._jobs.put((job, done))
        return done

    def check(self) -> None:
        """Raise the error of a job that has failed."""
        while self._pending and self._pending[0][1].done():
            self._take()

    def wait_for(self, made: Future[_T]) -> _T:
        """Wait for the result of a job, and return it. Raises the error of a failed job."""
        while not wait([made], _LOOK_S).done:
            self.check()
        return made.result()

    def finish(self) -> None:
        """Wait until all jobs are done. Raises the error of a failed job."""
        while self._pending:
            progress.say(self._pending[0][0])
            self._take()

    def _work(self) -> None:
        while (next_job := self._jobs.get()) is not None:
            job, done = next_job
            try:
                if not self._failed:
                    job()
            except BaseException as error:  # noqa: BLE001 - raised on the main thread
                self._failed = True
                done.set_exception(error)
            else:
                done.set_result(None)

    def _take(self) -> None:
        self._pending.popleft()[1].result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._failed = True  # prevents waiting jobs from running
        self._jobs.put(None)
        if kind is None:
            self._thread.join()
