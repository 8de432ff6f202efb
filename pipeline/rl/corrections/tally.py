"""Sums over the tokens and sequences of a step, which can be added across ranks.

Dimensions: X is the number of values in an array.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.rl.moments import EMPTY, Moments

Bins = Counter[int]
"""The count of numbers in each bin. Converted to float32, the numbers in a bin have the same sign,
the same exponent and the same first 7 bits of the mantissa. A bin's width is therefore at most
1/128 of the size of any number in it. All ranks use the same bins, so adding counts is exact."""


def bins(values_X: npt.ArrayLike) -> Bins:
    """Count the numbers in each bin; all numbers must be finite."""
    array_X = np.asarray(values_X, np.float32) + np.float32(0)  # puts -0 into the bin of 0
    bits_X = array_X.view(np.uint32) >> 16
    found, counts = np.unique(bits_X, return_counts=True)
    return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))


def quantiles(counted: Bins, shares: tuple[float, ...]) -> list[float | None]:
    """Return an approximate quantile for each of `shares`; None if there are no numbers.

    The quantile of a share is the smallest number x such that at least this share of all numbers
    is not larger than x. The result is the middle of the quantile's bin, so its relative error is
    at most 1/256.
    """
    if not counted:
        return [None] * len(shares)
    codes = np.array(list(counted), np.uint32)
    middles = (codes << 16 | 0x8000).astype(np.uint32).view(np.float32).astype(np.float64)
    middles[codes == 0] = 0.0
    order = np.argsort(middles)
    reached = np.cumsum(np.array(list(counted.values()))[order])
    places = [int(np.searchsorted(reached, share * reached[-1])) for share in shares]
    return [float(middles[order[min(place, len(order) - 1)]]) for place in places]


@dataclass(frozen=True)
class Tally:
    """The moments and the bin counts of a correction's statistics, keyed by name."""

    moments: Mapping[str, Moments] = field(default_factory=dict)
    bins: Mapping[str, Bins] = field(default_factory=dict)

    def __add__(self, other: "Tally") -> "Tally":
        names = {**self.moments, **other.moments}
        return Tally(
            {name: self[name] + other[name] for name in names},
            {
                name: self.bins.get(name, Counter()) + other.bins.get(name, Counter())
                for name in {**self.bins, **other.bins}
            },
        )

    def __getitem__(self, name: str) -> Moments:
        return self.moments.get(name, EMPTY)
