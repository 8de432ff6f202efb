"""Advantages: what a sample's reward says about its tokens."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

EPSILON = 1e-6
"""Added to a group's standard deviation, as verl does."""


def grpo_advantages(
    rewards_X: npt.NDArray[np.float64], groups: Sequence[str], normalise: bool
) -> npt.NDArray[np.float32]:
    """Group-relative advantages: A = (r - mean(group)) / (std(group) + 1e-6).

    X samples in any order; `groups` names the group of each. The standard deviation is the
    unbiased one (divided by n - 1). Without `normalise` the mean alone is subtracted (Dr. GRPO,
    arXiv 2503.20783).

    A reward of NaN means that the sample is masked: it takes no part in its group's mean and
    standard deviation, and its advantage is 0. A group with one reward left has mean 0 and
    standard deviation 1: with nothing to compare with, the reward itself is the advantage.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1; conventions (unbiased, epsilon, groups of
    one) from verl's compute_grpo_outcome_advantage. Deviation: computed in float64, verl's float32.
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        if not np.isnan(rewards_X[index]):
            members.setdefault(group, []).append(index)
    advantages_X = np.zeros(len(groups), np.float64)
    for indices in members.values():
        rewards = rewards_X[indices]
        mean, std = (rewards.mean(), rewards.std(ddof=1)) if len(indices) > 1 else (0.0, 1.0)
        advantages_X[indices] = (rewards - mean) / (std + EPSILON if normalise else 1.0)
    return advantages_X.astype(np.float32)
