"""Work spread over the cores that this process may use."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pipeline.hardware import core_count

MOST_THREADS = 4
"""Several ranks and workers share a machine, and each of them may be told of all its cores."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def thread_count() -> int:
    """Threads for work that leaves Python's lock: one per core, at most MOST_THREADS."""
    return min(MOST_THREADS, core_count())


def in_threads(work: Callable[[_Item], _Result], items: Iterable[_Item]) -> list[_Result]:
    """The results of `work` by item, in order; raises what the first failing item raised."""
    work_items = list(items)
    threads = min(thread_count(), len(work_items))
    if threads < 2:
        return [work(item) for item in work_items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, work_items))
