"""Sums over sets of numbers, which give mean, spread and quantiles and can be added across ranks.

Dimensions: X is the number of values in a set.
"""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Moments:
    """Sums and extremes of a set of numbers.

    Example: the moments of 1 and 2 are Moments(2, 3.0, 5.0, 1.0, 2.0).
    """

    count: int
    total: float
    squares: float
    least: float
    most: float

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(
            self.count + other.count,
            self.total + other.total,
            self.squares + other.squares,
            min(self.least, other.least),
            max(self.most, other.most),
        )

    @property
    def mean(self) -> float | None:
        """The mean. For an empty set, all properties are None."""
        return self.total / self.count if self.count else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation, with divisor n."""
        if not self.count:
            return None
        return math.sqrt(max(self.squares / self.count - (self.total / self.count) ** 2, 0.0))

    @property
    def variance(self) -> float | None:
        """The variance, with divisor n - 1; None for fewer than two numbers."""
        if self.count < 2:
            return None
        return max(0.0, self.squares - self.total**2 / self.count) / (self.count - 1)

    @property
    def unbiased(self) -> float | None:
        """The standard deviation, with divisor n - 1; 0 for one number."""
        found = self.deviation
        if found is None or self.count == 1:
            return None if found is None else 0.0
        return found * math.sqrt(self.count / (self.count - 1))

    @property
    def effective(self) -> float | None:
        """The effective sample size as a fraction of n: (sum w)^2 / (n sum w^2).

        It is 0 if all numbers are 0.
        """
        if not self.count:
            return None
        return self.total**2 / (self.count * self.squares) if self.squares else 0.0

    @property
    def largest(self) -> float | None:
        """The largest number."""
        return self.most if self.count else None

    @property
    def smallest(self) -> float | None:
        """The smallest number."""
        return self.least if self.count else None


EMPTY = Moments(0, 0.0, 0.0, math.inf, -math.inf)


def moments(values_X: npt.ArrayLike) -> Moments:
    """Compute the moments of numbers or bools in float64."""
    array_X = np.asarray(values_X, np.float64)
    if not len(array_X):
        return EMPTY
    return Moments(
        count=len(array_X),
        total=float(array_X.sum()),
        squares=float(np.square(array_X).sum()),
        least=float(array_X.min()),
        most=float(array_X.max()),
    )


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
