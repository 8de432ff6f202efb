"""Sums over tokens and sequences of a step, which ranks add.

Letters: X values of any kind.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.rl.moments import EMPTY, Moments

Bins = Counter[int]
"""How many numbers lie in each bin. A bin holds the numbers that share sign, exponent and the first
7 bits of the mantissa of a float32: it is at most 1/128 of its numbers wide, wherever they lie, and
the bins of all ranks are the same, so that adding counts is exact."""


def bins(values_X: npt.ArrayLike) -> Bins:
    """Count numbers by bin; they must be finite."""
    array_X = np.asarray(values_X, np.float32) + np.float32(0)  # -0 lies with 0
    bits_X = array_X.view(np.uint32) >> 16
    found, counts = np.unique(bits_X, return_counts=True)
    return Counter(dict(zip(found.tolist(), counts.tolist(), strict=True)))


def quantiles(counted: Bins, shares: tuple[float, ...]) -> list[float | None]:
    """The middle of the bin with the smallest number that `share` of all numbers do not exceed.

    It is within 1/256 of that number, relative to it. None without numbers.
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
    """What was found, by name."""

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
