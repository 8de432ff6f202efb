"""The advantage estimators, which `estimator_table` lists by name.

A token's score is its reward minus its KL penalty (algorithm.use_kl_in_reward), and a sample's
score is the sum of its tokens' scores. Samples with a reward of NaN and tokens excluded from the
loss are not trained on, and no statistic includes them. The estimators that compare the samples of
a group give all tokens of a sample the same advantage.

All estimators that compare a group differ from verl: a sample whose group has no other score has
advantage 0, because its score cannot be compared with others. In verl, the advantage is then the
score itself, so masking all but one sample of a group turns a comparison into a raw reward. All
values are float64, while verl uses float32.

Dimensions: N is the number of a step's samples, X the number of this rank's samples, G the number
    of groups, and T the number of this rank's response tokens, concatenated sample by sample.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.rl.estimators.types import AlgorithmSettings, Estimate, Floats, Ranks, Rollouts

EPSILON = 1e-6
"""The number added to a group's standard deviation, as in verl."""
VARIANCE_EPSILON = 1e-8
"""The number added to the variance in whitening, as in verl."""


def grpo(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """GRPO: A = (r - mean(group)) / (std(group) + 1e-6), where std has divisor n - 1.

    With norm_adv_by_std_in_grpo=False, only the mean is subtracted (Dr. GRPO, arXiv 2503.20783).

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1; verl's compute_grpo_outcome_advantage.
    """
    groups = Groups.of(rollouts)
    advantages_N = groups.centred_N()
    if settings.norm_adv_by_std_in_grpo:
        advantages_N = advantages_N / (groups.std_G()[groups.group_N] + EPSILON)
    return Estimate(rollouts.of_tokens(advantages_N))


def grpo_passk(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """Pass@k: A = r_1 - r_2 for a group's best sample, and A = 0 for the others.

    r_1 and r_2 are the group's best and second best scores. With norm_adv_by_std_in_grpo, A is
    divided by std(group) + 1e-6, where std has divisor n - 1. If several samples have the best
    score, all have A = 0.

    Source: arXiv 2503.19595; verl's compute_grpo_passk_outcome_advantage, which refuses a group of
    one sample.
    """
    groups = Groups.of(rollouts)
    known = np.flatnonzero(groups.known_N)
    order = known[np.lexsort((-groups.scores_N[known], groups.group_N[known]))]
    group = groups.group_N[order]
    # In this order, the first sample of each group is its best, and the next is its second best.
    best = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]])[: len(group)])
    best = best[groups.number_G[group[best]] > 1]
    advantages_N = np.zeros(len(groups.scores_N))
    advantages_N[order[best]] = groups.scores_N[order[best]] - groups.scores_N[order[best + 1]]
    if settings.norm_adv_by_std_in_grpo:
        advantages_N /= groups.std_G()[groups.group_N] + EPSILON
    return Estimate(rollouts.of_tokens(advantages_N))


def rloo(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """RLOO: A = (r - mean(group)) n / (n - 1), where n is the number of scores in the group.

    A is the score minus the mean score of the group's other samples.

    Source: arXiv 2402.14740; verl's compute_rloo_outcome_advantage.
    """
    groups = Groups.of(rollouts)
    others_G = np.maximum(groups.number_G - 1, 1)
    factor_N = (groups.number_G / others_G)[groups.group_N]
    return Estimate(rollouts.of_tokens(groups.centred_N() * factor_N))


def opo(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """OPO: A = r - b, with the group's length-weighted mean score b = sum(l r) / sum(l).

    l is the number of a sample's tokens that are included in the loss; in the paper, l approximates
    the squared norm of the gradient. In a group without such tokens, A is 0.

    Source: arXiv 2505.23585; verl's compute_opo_outcome_advantage.
    """
    groups = Groups.of(rollouts)
    counted_N = rollouts.by_sample(rollouts.sums_X(rollouts.mask_T))
    weights_N = np.where(groups.known_N, counted_N, 0.0)
    return Estimate(rollouts.of_tokens(groups.centred_N(weights_N)))


def gpg(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """GPG: A = alpha (r - mean(group)), where alpha makes up for samples that contribute nothing.

    alpha is the number of the step's samples with a score, divided by the number of those whose
    score is not 0, or by 1 if all scores are 0. The paper's F_norm is 1, as in verl.

    Source: arXiv 2504.02546; verl's compute_gpg_outcome_advantage.
    """
    groups = Groups.of(rollouts)
    scored = int(np.count_nonzero(groups.scores_N[groups.known_N]))
    alpha = int(np.count_nonzero(groups.known_N)) / max(scored, 1)
    return Estimate(rollouts.of_tokens(alpha * groups.centred_N()))


def reinforce_plus_plus(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """REINFORCE++: the returns R_t = s_t + gamma R_(t+1), whitened over all tokens of the step.

    Source: arXiv 2501.03262; verl's compute_reinforce_plus_plus_outcome_advantage. `returns` and
        `whitened` describe two differences from verl.
    """
    returns_T = returns(rollouts, settings.gamma)
    return Estimate(whitened(returns_T, rollouts.mask_T, rollouts.ranks), returns_T)


def reinforce_plus_plus_baseline(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """REINFORCE++ with the group's mean as baseline: (r - mean(group)), whitened over all tokens.

    Every token of a sample has the sample's value; gamma is not used. In a group with a single
    score, the value is 0 (in verl, the score itself), and the whitening includes it.

    Source: arXiv 2501.03262; verl's compute_reinforce_plus_plus_baseline_outcome_advantage.
    """
    centred_T = rollouts.of_tokens(Groups.of(rollouts).centred_N())
    return Estimate(whitened(centred_T, rollouts.mask_T, rollouts.ranks))


def remax(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """ReMax: the undiscounted return from each token onwards, minus the greedy sample's reward.

    Source: arXiv 2310.10505; verl's compute_remax_outcome_advantage. Difference from verl: if the
        greedy sample of a prompt has no reward (NaN), the prompt's samples have advantage 0.

    Raises ValueError if `rollouts` contains no baselines.
    """
    if rollouts.baseline_N is None:
        raise ValueError("remax: the step has no rewards of greedy samples to compare with")
    returns_T = returns(rollouts, 1.0)
    difference_T = returns_T - rollouts.of_tokens(rollouts.baseline_N)
    return Estimate(np.where(np.isnan(difference_T), 0.0, difference_T), returns_T)


def gae(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """GAE: A_t = d_t + gamma lam A_(t+1), with d_t = s_t + gamma V_(t+1) - V_t.

    d_t is the temporal-difference error, s_t the score and V_t the critic's value. V and A are 0
    beyond the end of the response. The returns are A + V. The advantages are then whitened over all
    tokens of the step. Tokens excluded from the loss (such as an environment's) are not steps in
    time: t + 1 is the next token included in the loss.

    Source: arXiv 1506.02438; verl's compute_gae_advantage_return. There are two differences from
    verl. First, the score of an excluded token is added to that of the previous included token,
    while verl drops it. If a response ends with such tokens, its reward is at the last of these
    tokens. Second, whitening differs, as `whitened` describes.

    Raises ValueError if `rollouts` contains no values.
    """
    values_T = rollouts.values_T
    if values_T is None:
        raise ValueError("gae: the step has no values; this estimator requires a critic")
    advantages_T = np.zeros(len(values_T))
    ends_X = np.cumsum(rollouts.lengths_X)
    value_X, advantage_X, score_X = (np.zeros(len(ends_X)) for _ in range(3))
    for back in range(1, int(rollouts.lengths_X.max(initial=0)) + 1):
        here = np.flatnonzero(rollouts.lengths_X >= back)
        at = ends_X[here] - back
        counts = rollouts.mask_T[at]
        score_X[here] += rollouts.scores_T[at]
        here, at = here[counts], at[counts]
        error = score_X[here] + settings.gamma * value_X[here] - values_T[at]
        advantage_X[here] = error + settings.gamma * settings.lam * advantage_X[here]
        advantages_T[at] = advantage_X[here]
        value_X[here] = values_T[at]
        score_X[here] = 0.0
    returns_T = advantages_T + np.where(rollouts.mask_T, values_T, 0.0)
    return Estimate(whitened(advantages_T, rollouts.mask_T, rollouts.ranks), returns_T)


def returns(rollouts: Rollouts, gamma: float) -> Floats:
    """Return the discounted sum of scores from each token to its response's end, [T].

    Tokens excluded from the loss (such as an environment's) are not steps in time and do not
    discount the return. Difference from verl: the returns of earlier tokens include the score of
    such a token, while verl drops this score. If a response ends with such tokens, its reward is at
    the last of these tokens.
    """
    returns_T = np.zeros(len(rollouts.scores_T))
    ends_X = np.cumsum(rollouts.lengths_X)
    later_X = np.zeros(len(ends_X))
    for back in range(1, int(rollouts.lengths_X.max(initial=0)) + 1):
        here = np.flatnonzero(rollouts.lengths_X >= back)
        at = ends_X[here] - back
        discount = np.where(rollouts.mask_T[at], gamma, 1.0)
        returns_T[at] = rollouts.scores_T[at] + later_X[here]
        later_X[here] = discount * returns_T[at]
    return returns_T


def whitened(values_T: Floats, mask_T: npt.NDArray[np.bool_], ranks: Ranks) -> Floats:
    """Return (value - mean) / sqrt(variance + 1e-8) for the tokens in the loss; 0 elsewhere.

    The mean and the variance (with divisor n - 1) cover the tokens in the loss on all ranks; every
    data-parallel rank must call this. Source: verl's masked_whiten. Difference from verl: if only
    one token is in the loss, its value becomes 0, while verl refuses a single token.

    Args:
        values_T: The values of this rank's tokens.
        mask_T: Whether a token is included in the loss.
        ranks: The data-parallel ranks.
    """
    counted_T = np.where(mask_T, values_T, 0.0)
    tokens, total = ranks.total(np.array([np.count_nonzero(mask_T), counted_T.sum()]))
    centred_T = np.where(mask_T, values_T - total / max(tokens, 1.0), 0.0)
    (square,) = ranks.total(np.array([(centred_T**2).sum()]))
    white_T: Floats = centred_T / np.sqrt(square / max(tokens - 1.0, 1.0) + VARIANCE_EPSILON)
    return white_T


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

    scores_N: Floats
    """The samples' scores; NaN marks a missing score."""
    group_N: npt.NDArray[np.int64]
    """The index of each sample's group, from 0 without gaps."""
    known_N: npt.NDArray[np.bool_]
    """Whether a sample has a score."""
    number_G: Floats
    """Number of samples with a score in each group."""

    @classmethod
    def of(cls, rollouts: Rollouts) -> "Groups":
        """Return the groups of a step's samples, which may be in any order.

        Every data-parallel rank must call this.
        """
        scores_N = sample_scores(rollouts)
        _, group_N = np.unique(rollouts.groups_N, return_inverse=True)
        known_N = ~np.isnan(scores_N)
        return cls(scores_N, group_N, known_N, np.bincount(group_N, known_N).astype(np.float64))

    def centred_N(self, weights_N: Floats | None = None) -> Floats:
        """Return each score minus its group's mean, which may be weighted.

        The result is 0 for samples without a score, and in groups whose weights are all 0. In
        groups whose scores are all equal and in groups with a single score, it is exactly 0,
        however the mean is rounded.
        """
        weights_N = self.known_N.astype(np.float64) if weights_N is None else weights_N
        total_G = self._sums_G(np.where(self.known_N, self.scores_N, 0.0) * weights_N)
        weight_G = self._sums_G(weights_N)
        compared_G = (self.spread_G() > 0) & (weight_G > 0)
        mean_G = total_G / np.where(compared_G, weight_G, 1.0)
        compared_N = self.known_N & compared_G[self.group_N]
        return np.where(compared_N, self.scores_N - mean_G[self.group_N], 0.0)

    def std_G(self) -> Floats:
        """Return each group's standard deviation, with divisor n - 1; 0 for a single score."""
        square_G = self._sums_G(self.centred_N() ** 2)
        std_G: Floats = np.sqrt(square_G / np.maximum(self.number_G - 1, 1))
        return std_G

    def spread_G(self) -> Floats:
        """Return each group's largest score minus its smallest; NaN without scores."""
        low_G, high_G = np.full((2, len(self.number_G)), np.nan)
        known = self.group_N[self.known_N]
        np.fmin.at(low_G, known, self.scores_N[self.known_N])
        np.fmax.at(high_G, known, self.scores_N[self.known_N])
        spread_G: Floats = high_G - low_G
        return spread_G

    def _sums_G(self, values_N: Floats) -> Floats:
        return np.bincount(self.group_N, values_N, len(self.number_G)).astype(np.float64)
