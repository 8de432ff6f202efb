"""The processes that take part in a hand-over.

A party is a process that receives calls through a pipe. Unlike the links, the pipe has no limit.
The party answers with the result, the time at which the call ended (by the machine's clock), and
the processor seconds used.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.handover.link import Host

PATIENCE_S = 600


@dataclass(frozen=True)
class Done:
    """A party's answer."""

    result: Any
    ended: float
    """Time when the call ended, from time.perf_counter(); all processes on a machine share this
    clock."""
    cpu_s: float
    """Processor seconds that all threads used during the call."""
    total_cpu_s: float
    """Processor seconds since the process started. The difference between two answers includes the
    time used by threads that run between the calls."""


class Party:
    """The caller's end of the pipe to a process."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def start(self, what: str, *arguments: Any) -> None:
        """Start calling one of the process's methods; `finish` waits for the answer."""
        self._pipe.send((what, arguments))

    def finish(self) -> Done:
        """Wait for the call to end and return the answer.

        Raises RuntimeError with the other process's traceback if the call failed.
        """
        if not self._pipe.poll(PATIENCE_S):
            raise RuntimeError(f"no answer after {PATIENCE_S} s")
        done, failure = self._pipe.recv()
        if failure:
            raise RuntimeError(failure)
        assert isinstance(done, Done)
        return done

    def call(self, what: str, *arguments: Any) -> Any:
        """Call a method, wait for it to end, and return the result."""
        self.start(what, *arguments)
        return self.finish().result


@contextmanager
def party(role: Callable[[], Any], host: Host) -> Iterator[Party]:
    """Start a process with a role on a host, and end the process when the block ends."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_work, args=(there, role, host), daemon=True)
    process.start()
    there.close()
    try:
        yield Party(here)
    finally:
        here.close()
        process.join(PATIENCE_S)


def _work(pipe: Connection, role: Callable[[], Any], host: Host) -> None:
    host.enter()
    torch.set_num_threads(1)
    own = role()
    while True:
        try:
            what, arguments = pipe.recv()
        except EOFError:
            return
        cpu_began = time.process_time()
        try:
            result = getattr(own, what)(*arguments)
            cpu_s = time.process_time()
            pipe.send((Done(result, time.perf_counter(), cpu_s - cpu_began, cpu_s), None))
        except Exception:  # noqa: BLE001 - sent to the other end, which raises it
            pipe.send((None, traceback.format_exc()))
