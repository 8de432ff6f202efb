"""The inputs and results of advantage estimators.

Dimensions: N is the number of a step's samples, in the manifest's order; X is the number of this
    rank's samples; T is the number of these samples' response tokens, concatenated sample by
    sample.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Ranks(Protocol):
    """The data-parallel ranks that share a step's samples."""

    def total(self, values: Floats) -> Floats:
        """Return the sum over ranks; every rank must call this, with an array of the same shape."""


class OneRank:
    """A single rank with all samples of a step."""

    def total(self, values: Floats) -> Floats:
        """Return the values unchanged."""
        return values


class AlgorithmSettings(Protocol):
    """The settings under `algorithm` that estimators read."""

    @property
    def norm_adv_by_std_in_grpo(self) -> bool:
        """Whether a group's advantages are divided by its standard deviation."""

    @property
    def gamma(self) -> float:
        """The discount per token."""

    @property
    def lam(self) -> float:
        """GAE's lambda, which discounts later temporal-difference errors in addition to gamma."""


@dataclass(frozen=True)
class Rollouts:
    """The samples of a step, from the point of view of one data-parallel rank."""

    rewards_N: Floats
    """Rewards of all samples. NaN marks a sample that is not trained on. Estimators must not
    compare other samples with such a sample."""
    groups_N: npt.NDArray[np.int64]
    """For each sample, a number that identifies its group."""
    rows_X: npt.NDArray[np.int64]
    """This rank's samples, as indices of N."""
    lengths_X: npt.NDArray[np.int64]
    """Number of response tokens of each of this rank's samples."""
    mask_T: npt.NDArray[np.bool_]
    """Whether a token is included in the loss."""
    scores_T: Floats
    """Scores of tokens. A sample's reward is at its last token. All scores are 0 in samples that
    are not trained on."""
    ranks: Ranks
    baseline_N: Floats | None = None
    """For each sample, the reward of the greedy sample of the same prompt (ReMax); None with other
    estimators."""
    values_T: Floats | None = None
    """The critic's value of the text before each token; None if there is no critic."""

    @property
    def sample_T(self) -> npt.NDArray[np.int64]:
        """The sample of each token, as an index of X."""
        return np.repeat(np.arange(len(self.lengths_X)), self.lengths_X)

    def by_sample(self, values_X: Floats) -> Floats:
        """Collect one value per sample from all ranks, [N]; every rank must call this."""
        values_N = np.zeros(len(self.rewards_N))
        values_N[self.rows_X] = values_X
        return self.ranks.total(values_N)

    def sums_X(self, values_T: npt.NDArray[Any]) -> Floats:
        """Return the sum over each sample's tokens: [X]."""
        return np.bincount(self.sample_T, values_T, len(self.lengths_X)).astype(np.float64)

    def of_tokens(self, values_N: Floats) -> Floats:
        """Repeat each sample's value for this rank's tokens: [T]."""
        return values_N[self.rows_X][self.sample_T]


@dataclass(frozen=True)
class Estimate:
    """The result of an estimator, [T]; tokens excluded from the loss may have any value."""

    advantages_T: Floats
    returns_T: Floats | None = None
    """The returns that a critic learns to predict; None if the estimator does not compute
    returns."""


EstimatorFunction = Callable[[Rollouts, AlgorithmSettings], Estimate]

Need = Literal["group", "values", "baseline"]
"""The inputs that an estimator needs in addition to rewards and log-probs: other samples of the
same prompt (rollout.n of 2 or more), a critic's values, or the reward of a greedy sample."""


@dataclass(frozen=True)
class Estimator:
    """A row of the table of estimators."""

    function: EstimatorFunction
    advantage: str
    """A line for the docs that describes a token's advantage."""
    paper: str
    """The paper's arXiv number."""
    needs: frozenset[Need] = frozenset()
    settings: tuple[str, ...] = ()
    """Settings under `algorithm` that the estimator reads."""
