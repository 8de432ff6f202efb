"""Sums over a set of numbers, which give its mean and spread and can be added across ranks.

Dimensions: X is the number of values in the set.
"""

import math
from dataclasses import dataclass

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
