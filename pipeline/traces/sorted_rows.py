"""Rows of K ids, many at a time: put in order, or found to be in order.

Letters: N rows, K ids.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 15
"""Rows processed at once: they stay in the processor's cache."""


def is_sorted(sets: npt.NDArray[Any]) -> bool:
    """Whether each row's ids ascend, none of them twice."""
    rows_NK = np.ascontiguousarray(sets).reshape(-1, sets.shape[-1])
    larger = np.empty(rows_NK[:BLOCK].shape, np.bool_)
    for start in range(0, len(rows_NK), BLOCK):
        ids = rows_NK[start : start + BLOCK].ravel()
        # Compared as one long row: a row's first id may be less than the last id of the row before.
        found = larger.ravel()[: len(ids)]
        np.greater(ids[1:], ids[:-1], out=found[1:])
        found[:: sets.shape[-1]] = True
        if not found.all():
            return False
    return True


def sort_rows(sets: npt.NDArray[Any]) -> bool:
    """Sort each row in place; return False if some row has the same id twice.

    A network of minima and maxima over whole columns: np.sort calls a routine for each short row,
    which is 10 times slower for K = 8; numba's code for the same network is no faster.
    """
    topk = sets.shape[-1]
    rows_NK = sets.reshape(-1, topk)
    size = min(len(rows_NK), BLOCK)
    block = np.empty((topk + 1, size), sets.dtype)
    same = np.zeros((topk, size), np.bool_)
    for start in range(0, len(rows_NK), BLOCK):
        rows = rows_NK[start : start + BLOCK]
        block[:topk, : len(rows)] = rows.T
        *columns, spare = block[:, : len(rows)]
        for i, j in _network(topk):
            np.minimum(columns[i], columns[j], out=spare)
            np.maximum(columns[i], columns[j], out=columns[j])
            columns[i], spare = spare, columns[i]
        for k, column in enumerate(columns):
            rows[:, k] = column
            if k:
                np.equal(columns[k - 1], column, out=same[k, : len(rows)])
        if same[:, : len(rows)].any():
            return False
    return True


@cache
def _network(size: int) -> tuple[tuple[int, int], ...]:
    """Pairs (i, j), i < j, to put in order one after the other: Batcher's odd-even merge sort.

    For a size that is not a power of two: those pairs of the next power that lie within the size.
    """
    pairs = []
    whole = 1 << max(size - 1, 0).bit_length()
    run = 1
    while run < whole:
        step = run
        while step:
            for first in range(step % run, whole - step, 2 * step):
                for i in range(first, min(first + step, whole - step)):
                    if i // (2 * run) == (i + step) // (2 * run) and i + step < size:
                        pairs.append((i, i + step))
            step //= 2
        run *= 2
    return tuple(pairs)
