"""Advantages computed from the rewards of a group's samples."""

import numpy as np
import numpy.typing as npt

from pipeline.rl.estimators.types import AlgorithmSettings, Estimate, Rollouts

EPSILON = 1e-6
"""Added to a group's standard deviation, as verl does."""


def grpo(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """Give every token of a sample the group-relative advantage of the sample's reward.

    See `grpo_advantages`.
    """
    normalise = settings.norm_adv_by_std_in_grpo
    advantages_N = grpo_advantages(rollouts.rewards_N, rollouts.groups_N, normalise)
    return Estimate(rollouts.of_tokens(advantages_N))


def grpo_advantages(
    rewards_X: npt.NDArray[np.float64], groups: npt.ArrayLike, normalise: bool
) -> npt.NDArray[np.float64]:
    """Group-relative advantages: A = (r - mean(group)) / (std(group) + 1e-6).

    X samples in any order; `groups` has the name or number of each sample's group; G groups. The
    standard deviation is the unbiased one (divided by n - 1). Without `normalise` only the mean is
    subtracted (Dr. GRPO, arXiv 2503.20783).

    A reward of NaN masks the sample: it does not count in its group's mean and standard deviation,
    and its advantage is 0. A group with a single reward has mean 0 and standard deviation 1: with
    nothing to compare it with, the reward itself is the advantage.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1; conventions (unbiased, epsilon, groups of
    one) from verl's compute_grpo_outcome_advantage. Difference: float64 here, float32 in verl.
    """
    _, group_X = np.unique(groups, return_inverse=True)
    known_X = ~np.isnan(rewards_X)
    number_G = np.bincount(group_X, known_X)
    several_G = number_G > 1
    total_G = np.bincount(group_X, np.where(known_X, rewards_X, 0.0))
    mean_G = np.where(several_G, total_G / np.maximum(number_G, 1), 0.0)
    centred_X = np.where(known_X, rewards_X - mean_G[group_X], 0.0)
    if not normalise:
        return centred_X
    square_G = np.bincount(group_X, centred_X**2) / np.maximum(number_G - 1, 1)
    std_G = np.where(several_G, np.sqrt(square_G), 1.0)
    return centred_X / (std_G[group_X] + EPSILON)
