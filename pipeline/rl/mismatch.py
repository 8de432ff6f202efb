"""Mismatch: the distance between the trainer's distribution and the one sampled from."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

EXTREME_RATIO = 2.0
"""A token is extreme if the two probabilities differ by more than this factor, either way."""


@dataclass(frozen=True)
class Mismatch:
    """Sums over response tokens, so that ranks can add theirs.

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
        """Mean per token; None without tokens."""
        return self.kl_sum / self.tokens if self.tokens else None

    @property
    def extreme_share(self) -> float | None:
        """Share of extreme tokens; None without tokens."""
        return self.extreme / self.tokens if self.tokens else None


def total_mismatch(of_ranks: Iterable[Mismatch | None]) -> Mismatch | None:
    """The sum of those that were measured; None: none was."""
    parts = [part for part in of_ranks if part is not None]
    return sum(parts[1:], start=parts[0]) if parts else None


def mismatch(trainer_X: npt.NDArray[np.float32], engine_X: npt.NDArray[np.float32]) -> Mismatch:
    """Compare the log-probs of X sampled tokens in trainer and engine.

    KL(engine || trainer) by Schulman's k3: with d = trainer - engine, the mean of exp(d) - d - 1
    over tokens that the engine sampled; d is clamped to +-20 against overflow. Extreme tokens:
    |d| > log 2 (arXiv 2510.11370, section 3).
    """
    difference_X = np.clip(trainer_X.astype(np.float64) - engine_X.astype(np.float64), -20, 20)
    return Mismatch(
        tokens=len(difference_X),
        kl_sum=float((np.exp(difference_X) - difference_X - 1.0).sum()),
        extreme=int((np.abs(difference_X) > np.log(EXTREME_RATIO)).sum()),
    )
