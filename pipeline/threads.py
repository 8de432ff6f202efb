"""Spreads work over the cores that this process may use, and overlaps requests that mostly wait."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from pipeline.hardware import core_count

MOST_THREADS = 4
"""The maximum number of threads for work on cores. Several ranks and workers share a machine, and
each may see all its cores."""
AT_ONCE = 16
"""The maximum number of store requests that one task has in flight. Most of a request's time is
spent waiting for the response."""

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def thread_count() -> int:
    """Return the number of threads for work that releases Python's global interpreter lock.

    There is one thread per core, up to MOST_THREADS.
    """
    return min(MOST_THREADS, core_count())


def in_threads(
    work: Callable[[_Item], _Result], items: Iterable[_Item], most: int = MOST_THREADS
) -> list[_Result]:
    """Return the results of `work` for all items, in order.

    Args:
        work: Called once per item, in some thread.
        items: The items.
        most: The maximum number of threads. Pass a larger number if one process works for the
            entire machine.

    Raises:
        Exception: The exception of the first item, in order, that failed.
    """
    work_items = list(items)
    threads = min(most, core_count(), len(work_items))
    if threads < 2:
        return [work(item) for item in work_items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, work_items))


def in_order(
    work: Callable[[_Item], _Result], items: Iterable[_Item], at_once: int = AT_ONCE
) -> Iterator[_Result]:
    """Yield the results of `work` in the order of the items.

    Use this function for work that mostly waits, such as requests, and `in_threads` for work that
    occupies cores.

    Args:
        work: Called once per item, in some thread.
        items: The items.
        at_once: The maximum number of items in progress or with an unread result. This limits the
            memory used.

    Raises:
        Exception: The exception of the first item, in order, that failed. The results of earlier
            items are yielded first. Items whose work has not started by then are skipped.
    """
    results: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for item in items:
                results.append(pool.submit(work, item))
                if len(results) == at_once:
                    yield results.popleft().result()
            while results:
                yield results.popleft().result()
        finally:
            for result in results:
                result.cancel()
