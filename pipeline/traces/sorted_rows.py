"""Sorts many rows of K ids at a time, and checks that rows are sorted.

Dimensions: N is the number of rows, K the number of ids per row.
"""

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 1 << 15
"""Number of rows processed at a time; this many rows fit in the processor's cache."""


def is_sorted(sets: npt.NDArray[Any]) -> bool:
    """Return whether each row's ids ascend without duplicates."""
    rows_NK = np.ascontiguousarray(sets).reshape(-1, sets.shape[-1])
    larger = np.empty(rows_NK[:BLOCK].shape, np.bool_)
    for start in range(0, len(rows_NK), BLOCK):
        ids = rows_NK[start : start + BLOCK].ravel()
        # Compare all rows as one long row. Where two rows meet, the ids may descend.
        found = larger.ravel()[: len(ids)]
        np.greater(ids[1:], ids[:-1], out=found[1:])
        found[:: sets.shape[-1]] = True
        if not found.all():
            return False
    return True


def sort_rows(sets: npt.NDArray[Any]) -> bool:
    """Sort each row in place; return False if a row contains the same id twice.

    The rows are sorted by a sorting network, which takes minima and maxima of entire columns.
    np.sort instead calls a routine for each short row, and is 10 times slower for K = 8. Compiling
    the network with numba would not make it faster.
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
        if np.count_nonzero(same[:, : len(rows)]):  # any() takes longer
            return False
    return True


@cache
def _network(size: int) -> tuple[tuple[int, int], ...]:
    """Return, in order, the pairs (i, j) with i < j that Batcher's odd-even merge sort compares.

    If the size is not a power of two, these are the pairs for the next power of two, except the
    pairs in which j is not below the size.
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
