"""Advantages that compare a sample's score with those of its group, equal for all its tokens.

A sample's score is the sum of its tokens' scores: its reward, minus what algorithm.use_kl_in_reward
takes. What is not trained on (a reward of NaN) counts in no statistic and has advantage 0.

Difference to verl in all of them: a group with a single score has advantage 0, as there is nothing
to compare it with; verl takes the score itself, so that masking all but one sample of a group would
turn a comparison into a raw reward. Another: float64 here, float32 in verl.

Letters: N samples of a step, X samples of this rank, G groups, T response tokens of this rank.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.rl.estimators.types import AlgorithmSettings, Estimate, Floats, Rollouts

EPSILON = 1e-6
"""Added to a group's standard deviation, as verl does."""


def grpo(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """GRPO: A = (r - mean(group)) / (std(group) + 1e-6), the deviation divided by n - 1.

    With norm_adv_by_std_in_grpo=False only the mean is subtracted (Dr. GRPO, arXiv 2503.20783).

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1; verl's compute_grpo_outcome_advantage.
    """
    scores_N = sample_scores(rollouts)
    groups = Groups.of(rollouts.groups_N, scores_N)
    advantages_N = groups.centred_N(scores_N)
    if settings.norm_adv_by_std_in_grpo:
        advantages_N = advantages_N / (groups.std_G(scores_N)[groups.group_N] + EPSILON)
    return Estimate(rollouts.of_tokens(advantages_N))


def grpo_passk(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """Pass@k: A = r_1 - r_2 for a group's best sample, r_2 being the second best's; 0 for others.

    With norm_adv_by_std_in_grpo divided by std(group) + 1e-6 (unbiased). Equally good best samples
    all have 0.

    Source: arXiv 2503.19595; verl's compute_grpo_passk_outcome_advantage, which refuses a group of
    one sample.
    """
    scores_N = sample_scores(rollouts)
    groups = Groups.of(rollouts.groups_N, scores_N)
    known = np.flatnonzero(groups.known_N)
    order = known[np.lexsort((-scores_N[known], groups.group_N[known]))]
    group = groups.group_N[order]
    # The first of each group in this order is its best sample, the next one the second best.
    best = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]])[: len(group)])
    best = best[groups.number_G[group[best]] > 1]
    advantages_N = np.zeros(len(scores_N))
    advantages_N[order[best]] = scores_N[order[best]] - scores_N[order[best + 1]]
    if settings.norm_adv_by_std_in_grpo:
        advantages_N /= groups.std_G(scores_N)[groups.group_N] + EPSILON
    return Estimate(rollouts.of_tokens(advantages_N))


def rloo(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """RLOO: a sample's score minus the mean of its group's others: A = (r - mean) n / (n - 1).

    Source: arXiv 2402.14740; verl's compute_rloo_outcome_advantage.
    """
    scores_N = sample_scores(rollouts)
    groups = Groups.of(rollouts.groups_N, scores_N)
    others_G = np.maximum(groups.number_G - 1, 1)
    factor_N = (groups.number_G / others_G)[groups.group_N]
    return Estimate(rollouts.of_tokens(groups.centred_N(scores_N) * factor_N))


def opo(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """OPO: A = r - b, with b the group's mean score weighted by length: sum(l r) / sum(l).

    l are a sample's tokens that count in the loss, for which the paper takes the gradient's squared
    norm to stand. A group without a token that counts has advantage 0.

    Source: arXiv 2505.23585; verl's compute_opo_outcome_advantage.
    """
    scores_N = sample_scores(rollouts)
    groups = Groups.of(rollouts.groups_N, scores_N)
    counted_N = rollouts.by_sample(rollouts.sums_X(rollouts.mask_T))
    weights_N = np.where(groups.known_N, counted_N, 0.0)
    return Estimate(rollouts.of_tokens(groups.centred_N(scores_N, weights_N)))


def gpg(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """GPG: A = alpha (r - mean(group)), with alpha = samples / samples whose score is not 0.

    alpha is of the whole step (at least one sample is taken to have a score), and makes up for
    samples that contribute nothing. The paper's F_norm is 1, as in verl.

    Source: arXiv 2504.02546; verl's compute_gpg_outcome_advantage.
    """
    scores_N = sample_scores(rollouts)
    groups = Groups.of(rollouts.groups_N, scores_N)
    scored = int(np.count_nonzero(scores_N[groups.known_N]))
    alpha = int(np.count_nonzero(groups.known_N)) / max(scored, 1)
    return Estimate(rollouts.of_tokens(alpha * groups.centred_N(scores_N)))


def sample_scores(rollouts: Rollouts) -> Floats:
    """The score of each sample of the step, [N]; NaN: it is not trained on.

    All ranks call. A response without a token has its reward.
    """
    scores_X = rollouts.sums_X(rollouts.scores_T)
    rewards_X = rollouts.rewards_N[rollouts.rows_X]
    scores_X = np.where(rollouts.lengths_X > 0, scores_X, np.nan_to_num(rewards_X))
    return np.where(np.isnan(rollouts.rewards_N), np.nan, rollouts.by_sample(scores_X))


@dataclass(frozen=True)
class Groups:
    """The groups of a step and which of their samples have a score."""

    group_N: npt.NDArray[np.int64]
    """Number of each sample's group, from 0 on without gaps."""
    known_N: npt.NDArray[np.bool_]
    number_G: Floats
    """Samples with a score."""

    @classmethod
    def of(cls, groups_N: npt.ArrayLike, scores_N: Floats) -> "Groups":
        """Number the groups of samples in any order; a score of NaN is not known."""
        _, group_N = np.unique(groups_N, return_inverse=True)
        known_N = ~np.isnan(scores_N)
        return cls(group_N, known_N, np.bincount(group_N, known_N).astype(np.float64))

    def centred_N(self, scores_N: Floats, weights_N: Floats | None = None) -> Floats:
        """Each score minus its group's mean, which may be weighted; 0 where nothing is known, in a
        group whose scores are all equal (exactly, whatever the rounding of the mean; a single score
        is equal to itself), and where all weights are 0."""
        weights_N = self.known_N.astype(np.float64) if weights_N is None else weights_N
        total_G = self._sums_G(np.where(self.known_N, scores_N, 0.0) * weights_N)
        weight_G = self._sums_G(weights_N)
        compared_G = (self.spread_G(scores_N) > 0) & (weight_G > 0)
        mean_G = total_G / np.where(compared_G, weight_G, 1.0)
        compared_N = self.known_N & compared_G[self.group_N]
        return np.where(compared_N, scores_N - mean_G[self.group_N], 0.0)

    def std_G(self, scores_N: Floats) -> Floats:
        """The standard deviation in each group, divided by n - 1; 0 with a single score."""
        square_G = self._sums_G(self.centred_N(scores_N) ** 2)
        std_G: Floats = np.sqrt(square_G / np.maximum(self.number_G - 1, 1))
        return std_G

    def spread_G(self, scores_N: Floats) -> Floats:
        """The largest score minus the smallest of each group; NaN without any score."""
        low_G, high_G = np.full((2, len(self.number_G)), np.nan)
        known = self.group_N[self.known_N]
        np.fmin.at(low_G, known, scores_N[self.known_N])
        np.fmax.at(high_G, known, scores_N[self.known_N])
        spread_G: Floats = high_G - low_G
        return spread_G

    def _sums_G(self, values_N: Floats) -> Floats:
        return np.bincount(self.group_N, values_N, len(self.number_G)).astype(np.float64)
