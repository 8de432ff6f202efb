"""Timing: medians of several repetitions on one core, and work in new processes."""

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
    """Keep this process and all its threads on one core for the duration of a block."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def typical(
    work: Callable[[], Result], repetitions: int, limit_s: float = 2.0
) -> tuple[float, Result]:
    """Repeat some work and return the median of its processor seconds.

    The processor seconds exclude the time of other programs, although these still affect them
    through the caches.

    Args:
        work: Function to call.
        repetitions: Number of calls.
        limit_s: Wall-clock seconds after which no further call begins; there is at least one call.

    Returns:
        The median in seconds, and the result of the last call.
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
    """Time and memory that one piece of work takes in a new process."""

    seconds: float
    cpu_s: float
    """Processor seconds; equal to `seconds` on an idle machine with a fast disk."""
    peak_bytes: int
    """Peak resident memory of the process, including interpreter and libraries."""
    result: Any


def in_fresh_process(work: Callable[..., Any], *arguments: Any) -> Phase:
    """Run a module-level function in a new process, and measure it, excluding the process's start.

    Raises RuntimeError if the process ends without an answer; stderr then contains the traceback.
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
    """Return the line below a table: the processor, its load, and the versions of some packages."""
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    found = [f"{name} {importlib.metadata.version(name)}" for name in packages]
    processor = f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    load = f"load {os.getloadavg()[1]:.1f} including this program"
    if priority := _priority():
        load += f", which ran at nice {priority}"
    return "; ".join([processor, load, f"Python {platform.python_version()}", *found]) + "."


def _priority() -> int:
    """Return this program's niceness, or its session's if Linux schedules processes by session."""
    try:
        with open("/proc/self/autogroup") as line:  # "/autogroup-21 nice -9"
            return int(line.read().split()[-1]) or os.nice(0)
    except (OSError, IndexError):
        return os.nice(0)
