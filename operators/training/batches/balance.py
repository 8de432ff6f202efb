"""Divides samples into parts with nearly equal numbers of tokens."""

import heapq

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


def cut_evenly(lengths_N: Lengths, parts: int) -> list[slice]:
    """Cut samples into contiguous parts so that the longest part is as short as possible.

    This is the linear partition problem. Bisection finds the smallest feasible limit on tokens per
    part. A limit is tested by filling the parts in order, because this needs the fewest parts.

    Args:
        lengths_N: Number of tokens in each sample.
        parts: Number of parts.

    Returns:
        The samples of each part, in order. The last parts may be empty.
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
    """Return the ends of the parts when each part takes samples in order, up to `most` tokens."""
    ends, tokens = [], 0
    for i, length in enumerate(lengths_N.tolist()):
        if tokens and tokens + length > most:
            ends.append(i)
            tokens = 0
        tokens += length
    return [*ends, len(lengths_N)]


def bins(lengths_N: Lengths, count: int, most_samples: int | None) -> list[list[int]]:
    """Distribute samples over bins with nearly equal numbers of tokens.

    Samples are placed longest first, each in the bin with the fewest tokens so far. The fullest bin
    then holds at most 4/3 of the smallest possible maximum (R. L. Graham, Bounds on multiprocessing
    timing anomalies, 1969).

    Args:
        lengths_N: Number of tokens in each sample.
        count: Number of bins.
        most_samples: Maximum number of samples per bin; None for no limit.

    Returns:
        The indices of each bin's samples, ascending; the bin with the most tokens comes first.
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
