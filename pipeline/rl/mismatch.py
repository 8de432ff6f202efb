"""Mismatch: the distance between the trainer's distribution and the sampled one."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

EXTREME_RATIO = 2.0
"""A token is extreme if its probabilities under trainer and engine differ by more than this factor.
"""


@dataclass(frozen=True)
class Mismatch:
    """Sums over response tokens, which can be added across ranks.

    Example: Mismatch(tokens=512, kl_sum=0.8, extreme=3).
    """

    tokens: int
    kl_sum: float
    extreme: int

    def __add__(self, other: "Mismatch") -> "Mismatch":
        return Mismatch(
            self.tokens + other.tokens,
            self.kl_sum + other.kl_sum,
            self.extreme + other.extreme,
        )

    @property
    def kl(self) -> float | None:
        """The mean KL per token; None if there are no tokens."""
        return self.kl_sum / self.tokens if self.tokens else None

    @property
    def extreme_share(self) -> float | None:
        """The share of extreme tokens; None if there are no tokens."""
        return self.extreme / self.tokens if self.tokens else None


def total_mismatch(of_ranks: Iterable[Mismatch | None]) -> Mismatch | None:
    """Return the sum over the ranks that measured a mismatch; None if no rank did."""
    parts = [part for part in of_ranks if part is not None]
    return sum(parts[1:], start=parts[0]) if parts else None


def mismatch(trainer_X: npt.NDArray[np.float32], engine_X: npt.NDArray[np.float32]) -> Mismatch:
    """Compare the trainer's and the engine's log-probs of X sampled tokens.

    KL(engine || trainer) is estimated by Schulman's k3: the mean of exp(d) - d - 1 over tokens that
    the engine sampled, with d = trainer - engine clamped to +-20 to prevent overflow. A token with
    |d| > log 2 is extreme (arXiv 2510.11370, section 3). Tokens that the engine gave no log-prob
    (NaN) are left out. A NaN of the trainer counts as a probability of 0, so that it shows.
    """
    known_X = ~np.isnan(engine_X)
    trainer_X = np.nan_to_num(trainer_X[known_X].astype(np.float64), nan=-np.inf, neginf=-np.inf)
    difference_X = np.clip(trainer_X - engine_X[known_X].astype(np.float64), -20, 20)
    return Mismatch(
        tokens=len(difference_X),
        kl_sum=float((np.exp(difference_X) - difference_X - 1.0).sum()),
        extreme=int((np.abs(difference_X) > np.log(EXTREME_RATIO)).sum()),
    )
