"""Cutting samples into parts of nearly equal numbers of tokens."""

import heapq

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


def cut_evenly(lengths_N: Lengths, parts: int) -> list[slice]:
    """Cut a row of samples into neighbouring parts so that the longest part is as short as can be.

    Parts may be empty at the end. The linear partition problem: the bound on a part's tokens is
    found by bisection, because first-fit in order needs the fewest parts for a bound.
    """
    low, high = int(lengths_N.max(initial=0)), int(lengths_N.sum())
    while low < high:
        middle = (low + high) // 2
        if len(_fitted(lengths_N, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    ends = [*_fitted(lengths_N, high), *[len(lengths_N)] * parts][:parts]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _fitted(lengths_N: Lengths, most: int) -> list[int]:
    """The ends of the parts when each takes samples in order, up to `most` tokens."""
    ends, tokens = [], 0
    for i, length in enumerate(lengths_N.tolist()):
        if tokens and tokens + length > most:
            ends.append(i)
            tokens = 0
        tokens += length
    return [*ends, len(lengths_N)]


def bins(lengths_N: Lengths, count: int, most_samples: int | None) -> list[list[int]]:
    """Put samples into `count` bins of nearly equal tokens; return their indices, ascending.

    Longest first, each into the bin that is shortest so far: at most 4/3 of the best possible
    longest bin (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969). A bin holds at
    most `most_samples`. The fullest bin comes first.
    """
    open_bins = [(0, number) for number in range(count)]
    found: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for i in np.argsort(-lengths_N, kind="stable").tolist():
        load, number = heapq.heappop(open_bins)
        found[number].append(i)
        tokens[number] = load + int(lengths_N[i])
        if most_samples is None or len(found[number]) < most_samples:
            heapq.heappush(open_bins, (tokens[number], number))
    order = sorted(range(count), key=lambda number: -tokens[number])
    return [sorted(found[number]) for number in order]
