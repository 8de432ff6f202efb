"""What an advantage estimator reads and returns.

Letters: N samples of a step in the manifest's order, X samples of this rank, T response tokens of
this rank's samples, sample after sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Ranks(Protocol):
    """The data-parallel ranks that share a step's samples; all of them must call."""

    def total(self, values: Floats) -> Floats:
        """The sum over ranks of an array of one shape."""


class OneRank:
    """A step whose samples are all on one rank."""

    def total(self, values: Floats) -> Floats:
        """The values themselves."""
        return values


class AlgorithmSettings(Protocol):
    """The settings under `algorithm` that estimators read."""

    @property
    def norm_adv_by_std_in_grpo(self) -> bool:
        """Divide a group's advantages by its standard deviation."""

    @property
    def gamma(self) -> float:
        """Discount of what follows a token."""

    @property
    def lam(self) -> float:
        """GAE's weight of later differences."""


@dataclass(frozen=True)
class Rollouts:
    """A step's samples as one data-parallel rank knows them."""

    rewards_N: Floats
    """Rewards of all samples; NaN: the sample is not trained on, and no other sample may be
    compared with it."""
    groups_N: npt.NDArray[np.int64]
    """A number per sample, equal in a group."""
    rows_X: npt.NDArray[np.int64]
    """This rank's samples, as indices of N."""
    lengths_X: npt.NDArray[np.int64]
    """Response tokens of each."""
    mask_T: npt.NDArray[np.bool_]
    """Whether a token counts in the loss."""
    scores_T: Floats
    """Rewards of tokens: a sample's reward stands at its last token. Those of a sample that is not
    trained on are 0."""
    ranks: Ranks
    baseline_N: Floats | None = None
    """Reward of the greedy sample of each sample's prompt (ReMax); None: none was made."""
    values_T: Floats | None = None
    """The critic's values of the text before each token; None: there is no critic."""

    @property
    def sample_T(self) -> npt.NDArray[np.int64]:
        """The sample of each token, as an index of X."""
        return np.repeat(np.arange(len(self.lengths_X)), self.lengths_X)

    def by_sample(self, values_X: Floats) -> Floats:
        """Collect a value of each sample from all ranks: [N]."""
        values_N = np.zeros(len(self.rewards_N))
        values_N[self.rows_X] = values_X
        return self.ranks.total(values_N)

    def sums_X(self, values_T: npt.NDArray[Any]) -> Floats:
        """The sum over each sample's tokens: [X]."""
        return np.bincount(self.sample_T, values_T, len(self.lengths_X)).astype(np.float64)

    def of_tokens(self, values_N: Floats) -> Floats:
        """Repeat a value of each sample for this rank's tokens: [T]."""
        return values_N[self.rows_X][self.sample_T]


@dataclass(frozen=True)
class Estimate:
    """The result of an estimator, [T]; tokens that do not count may have any value."""

    advantages_T: Floats
    returns_T: Floats | None = None
    """What a critic learns to predict; None: the estimator knows no critic."""


EstimatorFunction = Callable[[Rollouts, AlgorithmSettings], Estimate]

Need = Literal["group", "values", "baseline"]
"""What an estimator needs beside rewards and log-probs: other samples of the same prompt
(rollout.n of 2 or more), a critic's values, or the reward of a greedy sample."""


@dataclass(frozen=True)
class Estimator:
    """A row of the table of estimators."""

    function: EstimatorFunction
    advantage: str
    """What a token's advantage is, in a line for the docs."""
    paper: str
    """Its number at arXiv."""
    needs: frozenset[Need] = frozenset()
    settings: tuple[str, ...] = ()
    """Settings under `algorithm` that it reads."""
