"""Advantages that compare a sample's score with its group's scores.

All tokens of a sample have the same advantage. A sample's score is the sum of its tokens' scores:
its reward, minus the KL penalty of algorithm.use_kl_in_reward. A sample that is not trained on (its
reward is NaN) is excluded from all statistics and has advantage 0.

All these estimators differ from verl in two ways. First, a sample whose group has no other score
has advantage 0, because its score cannot be compared with others. In verl, the advantage is then
the score itself, so masking all but one sample of a group turns a comparison into a raw reward.
Second, values are float64, while verl uses float32.

Dimensions: N is the number of a step's samples, X the number of this rank's samples, G the number
    of groups, and T the number of this rank's response tokens.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.rl.estimators.types import AlgorithmSettings, Estimate, Floats, Rollouts

EPSILON = 1e-6
"""The number added to a group's standard deviation, as in verl."""


def grpo(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """GRPO: A = (r - mean(group)) / (std(group) + 1e-6), where std has divisor n - 1.

    With norm_adv_by_std_in_grpo=False, only the mean is subtracted (Dr. GRPO, arXiv 2503.20783).

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1; verl's compute_grpo_outcome_advantage.
    """
    scores_N = sample_scores(rollouts)
    groups = Groups.of(rollouts.groups_N, scores_N)
    advantages_N = groups.centred_N(scores_N)
    if settings.norm_adv_by_std_in_grpo:
        advantages_N = advantages_N / (groups.std_G(scores_N)[groups.group_N] + EPSILON)
    return Estimate(rollouts.of_tokens(advantages_N))


def grpo_passk(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """Pass@k: A = r_1 - r_2 for a group's best sample, and A = 0 for the others.

    r_1 and r_2 are the group's best and second best scores. With norm_adv_by_std_in_grpo, A is
    divided by std(group) + 1e-6, where std has divisor n - 1. If several samples have the best
    score, all have A = 0.

    Source: arXiv 2503.19595; verl's compute_grpo_passk_outcome_advantage, which refuses a group of
    one sample.
    """
    scores_N = sample_scores(rollouts)
    groups = Groups.of(rollouts.groups_N, scores_N)
    known = np.flatnonzero(groups.known_N)
    order = known[np.lexsort((-scores_N[known], groups.group_N[known]))]
    group = groups.group_N[order]
    # In this order, the first sample of each group is its best, and the next is its second best.
    best = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]])[: len(group)])
    best = best[groups.number_G[group[best]] > 1]
    advantages_N = np.zeros(len(scores_N))
    advantages_N[order[best]] = scores_N[order[best]] - scores_N[order[best + 1]]
    if settings.norm_adv_by_std_in_grpo:
        advantages_N /= groups.std_G(scores_N)[groups.group_N] + EPSILON
    return Estimate(rollouts.of_tokens(advantages_N))


def rloo(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """RLOO: A = (r - mean(group)) n / (n - 1), where n is the number of scores in the group.

    A is the score minus the mean score of the group's other samples.

    Source: arXiv 2402.14740; verl's compute_rloo_outcome_advantage.
    """
    scores_N = sample_scores(rollouts)
    groups = Groups.of(rollouts.groups_N, scores_N)
    others_G = np.maximum(groups.number_G - 1, 1)
    factor_N = (groups.number_G / others_G)[groups.group_N]
    return Estimate(rollouts.of_tokens(groups.centred_N(scores_N) * factor_N))


def opo(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """OPO: A = r - b, with the group's length-weighted mean score b = sum(l r) / sum(l).

    l is the number of a sample's tokens that are included in the loss; in the paper, l approximates
    the squared norm of the gradient. In a group without such tokens, A is 0.

    Source: arXiv 2505.23585; verl's compute_opo_outcome_advantage.
    """
    scores_N = sample_scores(rollouts)
    groups = Groups.of(rollouts.groups_N, scores_N)
    counted_N = rollouts.by_sample(rollouts.sums_X(rollouts.mask_T))
    weights_N = np.where(groups.known_N, counted_N, 0.0)
    return Estimate(rollouts.of_tokens(groups.centred_N(scores_N, weights_N)))


def gpg(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """GPG: A = alpha (r - mean(group)), where alpha makes up for samples that contribute nothing.

    alpha is the number of the step's samples with a score, divided by the number of those whose
    score is not 0, or by 1 if all scores are 0. The paper's F_norm is 1, as in verl.

    Source: arXiv 2504.02546; verl's compute_gpg_outcome_advantage.
    """
    scores_N = sample_scores(rollouts)
    groups = Groups.of(rollouts.groups_N, scores_N)
    scored = int(np.count_nonzero(scores_N[groups.known_N]))
    alpha = int(np.count_nonzero(groups.known_N)) / max(scored, 1)
    return Estimate(rollouts.of_tokens(alpha * groups.centred_N(scores_N)))


def sample_scores(rollouts: Rollouts) -> Floats:
    """Return the score of each sample of the step, [N]; NaN for samples that are not trained on.

    Every data-parallel rank must call this. The score of a response without tokens is its reward.
    """
    scores_X = rollouts.sums_X(rollouts.scores_T)
    rewards_X = rollouts.rewards_N[rollouts.rows_X]
    scores_X = np.where(rollouts.lengths_X > 0, scores_X, np.nan_to_num(rewards_X))
    return np.where(np.isnan(rollouts.rewards_N), np.nan, rollouts.by_sample(scores_X))


@dataclass(frozen=True)
class Groups:
    """The groups of a step's samples. Only samples with a score enter a group's statistics."""

    group_N: npt.NDArray[np.int64]
    """The index of each sample's group, from 0 without gaps."""
    known_N: npt.NDArray[np.bool_]
    """Whether a sample has a score."""
    number_G: Floats
    """Number of samples with a score in each group."""

    @classmethod
    def of(cls, groups_N: npt.ArrayLike, scores_N: Floats) -> "Groups":
        """Return the samples' groups. Samples may be in any order; NaN marks a missing score."""
        _, group_N = np.unique(groups_N, return_inverse=True)
        known_N = ~np.isnan(scores_N)
        return cls(group_N, known_N, np.bincount(group_N, known_N).astype(np.float64))

    def centred_N(self, scores_N: Floats, weights_N: Floats | None = None) -> Floats:
        """Return each score minus its group's mean, which may be weighted.

        The result is 0 for samples without a score, and in groups whose weights are all 0. In
        groups whose scores are all equal and in groups with a single score, it is exactly 0,
        however the mean is rounded.
        """
        weights_N = self.known_N.astype(np.float64) if weights_N is None else weights_N
        total_G = self._sums_G(np.where(self.known_N, scores_N, 0.0) * weights_N)
        weight_G = self._sums_G(weights_N)
        compared_G = (self.spread_G(scores_N) > 0) & (weight_G > 0)
        mean_G = total_G / np.where(compared_G, weight_G, 1.0)
        compared_N = self.known_N & compared_G[self.group_N]
        return np.where(compared_N, scores_N - mean_G[self.group_N], 0.0)

    def std_G(self, scores_N: Floats) -> Floats:
        """Return each group's standard deviation, with divisor n - 1; 0 for a single score."""
        square_G = self._sums_G(self.centred_N(scores_N) ** 2)
        std_G: Floats = np.sqrt(square_G / np.maximum(self.number_G - 1, 1))
        return std_G

    def spread_G(self, scores_N: Floats) -> Floats:
        """Return each group's largest score minus its smallest; NaN without scores."""
        low_G, high_G = np.full((2, len(self.number_G)), np.nan)
        known = self.group_N[self.known_N]
        np.fmin.at(low_G, known, scores_N[self.known_N])
        np.fmax.at(high_G, known, scores_N[self.known_N])
        spread_G: Floats = high_G - low_G
        return spread_G

    def _sums_G(self, values_N: Floats) -> Floats:
        return np.bincount(self.group_N, values_N, len(self.number_G)).astype(np.float64)
