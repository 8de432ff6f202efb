"""Timing: the median of several repetitions on one core, and work in fresh processes."""

import contextlib
import importlib.metadata
import multiprocessing
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Result = TypeVar("Result")


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Keep this process, whatever its threads, on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def typical(
    work: Callable[[], Result], repetitions: int, limit_s: float = 2.0
) -> tuple[float, Result]:
    """(median of the processor seconds of several repetitions, what the last one returned).

    Of this process, so that time which other programs took does not count; their traces in the
    caches do. No repetition begins after `limit_s` by the clock, but one is always made.
    """
    begun = time.perf_counter()
    seconds = []
    for _ in range(repetitions):
        started = time.process_time()
        result = work()
        seconds.append(time.process_time() - started)
        if time.perf_counter() - begun > limit_s:
            break
    return statistics.median(seconds), result


@dataclass(frozen=True)
class Phase:
    """What a fresh process needed for one piece of work."""

    seconds: float
    cpu_s: float
    """Of the processor: what is left of `seconds` when nothing else runs and no disk is slow."""
    peak_bytes: int
    """Most resident memory of the process, interpreter and libraries included."""
    result: Any


def in_fresh_process(work: Callable[..., Any], *arguments: Any) -> Phase:
    """Run a module-level function in a new process; its time leaves out the process's start.

    Raises RuntimeError when the process ends without an answer; its traceback is on stderr.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, work, arguments))
    process.start()
    theirs.close()
    try:
        seconds, cpu_s, peak_bytes, result = ours.recv()
    except EOFError as error:
        raise RuntimeError(f"{work.__name__}: its process ended without an answer") from error
    finally:
        process.join()
    return Phase(seconds, cpu_s, peak_bytes, result)


def _answer(pipe: Connection, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    started, cpu_started = time.perf_counter(), time.process_time()
    result = work(*arguments)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pipe.send((seconds, cpu_s, peak_bytes, result))


def machine(*packages: str) -> str:
    """The processor, how busy it is, and versions: the line below a table."""
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    processor = f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    load = f"load {os.getloadavg()[1]:.1f} with this program's own"
    if priority := _priority():
        load += f", which ran at nice {priority}"
    return "; ".join([processor, load, f"Python {platform.python_version()}", *found]) + "."


def _priority() -> int:
    """How nice this program is. Where Linux groups processes by session, the group's counts."""
    try:
        with open("/proc/self/autogroup") as line:  # "/autogroup-21 nice -9"
            return int(line.read().split()[-1]) or os.nice(0)
    except (OSError, IndexError):
        return os.nice(0)
