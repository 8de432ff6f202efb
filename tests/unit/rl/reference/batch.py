"""Random ragged batches of grouped samples; some or all of a sample's tokens may be excluded
from the loss.

Dimensions: L is the number of response tokens of one sample.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st


@dataclass(frozen=True)
class Sample:
    """A sample of a step. All numbers are float32 values in double precision."""

    group: int
    reward: float
    """The reward. NaN marks a sample that is not trained on; the loss excludes all its tokens."""
    baseline: float
    """The reward of the group's greedy sample."""
    mask_L: Any
    """Whether a token is included in the loss."""
    new_L: Any
    """Log-probs under the current weights."""
    old_L: Any
    """Log-probs under the weights at the step's start."""
    engine_L: Any
    """Log-probs from the engine."""
    scores_L: Any
    """Scores of tokens: a penalty at each token in the loss, and the reward at the last token."""
    values_L: Any
    advantages_L: Any
    weights_L: Any
    """Importance weights."""

    @property
    def counted(self) -> list[int]:
        """The indices of the tokens included in the loss."""
        return np.flatnonzero(self.mask_L).tolist()

    @property
    def score(self) -> float:
        """The sum of all scores."""
        return float(np.sum(self.scores_L))


Batch = list[Sample]


@st.composite
def batches(draw: st.DrawFn, spread: float = 1.0) -> Batch:
    """Draw groups of 1 to 5 samples of 1 to 8 tokens, in any order.

    Log-ratios have a standard deviation of about `spread`.
    """
    lengths = draw(st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=5), max_size=4))
    lengths.append([draw(st.integers(2, 8)), 3])  # all tokens of this group are in the loss
    number = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch = [
        _sample(number, group, length, spread)
        for group, of_group in enumerate(lengths)
        for length in of_group
    ]
    batch[-1].mask_L[:] = batch[-2].mask_L[:] = True
    batch = [_without_numbers(one) if not one.mask_L.any() else one for one in batch]
    greedy = {one.group: one.baseline for one in batch}
    batch = [Sample(**{**vars(one), "baseline": greedy[one.group]}) for one in batch]
    return [batch[place] for place in number.permutation(len(batch))]


def _sample(number: np.random.Generator, group: int, length: int, spread: float) -> Sample:
    def some(scale: float, shift: float = 0.0) -> Any:
        return number.normal(shift, scale, length).astype(np.float32).astype(np.float64)

    # Rewards are often equal, so that groups without variance are common.
    reward = float(np.float32(number.choice([0.0, 1.0, number.normal()], p=[0.4, 0.3, 0.3])))
    new_L = -number.exponential(2.0, length).astype(np.float32).astype(np.float64)
    mask_L = number.random(length) < number.choice([0.0, 0.7, 1.0], p=[0.1, 0.4, 0.5])
    scores_L = np.where(mask_L, some(0.1), 0.0)
    scores_L[-1] += reward
    return Sample(
        group=group,
        reward=reward,
        baseline=float(np.float32(number.normal())),
        mask_L=mask_L,
        new_L=new_L,
        old_L=np.minimum(new_L + some(spread), 0.0).astype(np.float32).astype(np.float64),
        engine_L=np.minimum(new_L + some(spread), 0.0).astype(np.float32).astype(np.float64),
        scores_L=scores_L,
        values_L=some(1.0),
        advantages_L=some(1.0),
        weights_L=np.abs(some(0.5, 1.0)),
    )


def _without_numbers(sample: Sample) -> Sample:
    return Sample(
        **{**vars(sample), "reward": float("nan"), "scores_L": np.zeros(len(sample.mask_L))}
    )
