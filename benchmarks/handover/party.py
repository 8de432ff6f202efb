"""The processes of a hand-over.

A party does what it is told through a pipe, which no link limits, and answers with what came of it,
when it ended by the machine's clock, and the processor seconds that it took.
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
    """What a party answers."""

    result: Any
    ended: float
    """Of time.perf_counter, which all processes of a machine share."""
    cpu_s: float
    """While it did that, all threads."""
    total_cpu_s: float
    """Since it started: the difference covers what threads did between two answers."""


class Party:
    """The other end of a process's pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def start(self, what: str, *arguments: Any) -> None:
        """Have it do something; `finish` waits for it."""
        self._pipe.send((what, arguments))

    def finish(self) -> Done:
        """Raises RuntimeError with the other process's traceback when it failed there."""
        if not self._pipe.poll(PATIENCE_S):
            raise RuntimeError(f"no answer after {PATIENCE_S} s")
        done, failure = self._pipe.recv()
        if failure:
            raise RuntimeError(failure)
        assert isinstance(done, Done)
        return done

    def call(self, what: str, *arguments: Any) -> Any:
        """Have it do something and wait for the result."""
        self.start(what, *arguments)
        return self.finish().result


@contextmanager
def party(role: Callable[[], Any], host: Host) -> Iterator[Party]:
    """Start a process in a role on a host, and end it."""
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
        except Exception:  # noqa: BLE001 - told to the other end, which raises it
            pipe.send((None, traceback.format_exc()))
