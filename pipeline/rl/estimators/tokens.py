"""Advantages per token: discounted returns, whitened over all tokens of the step; and ReMax.

What is not trained on (a reward of NaN, a token that does not count) is in no statistic. Token
scores are differences of rewards and KL penalties (see `kl_penalty`).

Letters: N samples of a step, X samples of this rank, T response tokens of this rank.
"""

import numpy as np
import numpy.typing as npt

from pipeline.rl.estimators.group import Groups, sample_scores
from pipeline.rl.estimators.types import AlgorithmSettings, Estimate, Floats, Ranks, Rollouts

VARIANCE_EPSILON = 1e-8
"""Added to the variance in whitening, as verl does."""


def reinforce_plus_plus(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """REINFORCE++: the returns R_t = s_t + gamma R_(t+1), whitened over all tokens of the step.

    Source: arXiv 2501.03262; verl's compute_reinforce_plus_plus_outcome_advantage. See
    `returns` and `whitened` for two differences.
    """
    returns_T = returns(rollouts, settings.gamma)
    return Estimate(whitened(returns_T, rollouts.mask_T, rollouts.ranks), returns_T)


def reinforce_plus_plus_baseline(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """REINFORCE++ with the group's mean as baseline: (r - mean(group)), whitened over all tokens.

    Every token of a sample has the sample's difference; gamma does not enter. A group with a single
    score has the difference 0, which takes part in the whitening (verl takes the score itself).

    Source: arXiv 2501.03262; verl's compute_reinforce_plus_plus_baseline_outcome_advantage.
    """
    scores_N = sample_scores(rollouts)
    centred_N = Groups.of(rollouts.groups_N, scores_N).centred_N(scores_N)
    centred_T = rollouts.of_tokens(centred_N)
    return Estimate(whitened(centred_T, rollouts.mask_T, rollouts.ranks))


def remax(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """ReMax: the undiscounted return from each token on, minus the greedy sample's reward.

    Source: arXiv 2310.10505; verl's compute_remax_outcome_advantage. Difference: the
    samples of a prompt whose greedy one has no reward (NaN) have advantage 0.
    Raises ValueError without baselines.
    """
    if rollouts.baseline_N is None:
        raise ValueError("remax: the step's greedy samples have no rewards to compare with")
    returns_T = returns(rollouts, 1.0)
    difference_T = returns_T - rollouts.of_tokens(rollouts.baseline_N)
    return Estimate(np.where(np.isnan(difference_T), 0.0, difference_T), returns_T)


def returns(rollouts: Rollouts, gamma: float) -> Floats:
    """The discounted sum of scores from each token to its response's end, [T].

    Tokens that do not count (an environment's) are no steps in time: the return passes them without
    a discount. Difference to verl: their own scores are added to the token before, not dropped, as
    the reward of a response that ends with such tokens stands at the last.
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
    """(value - mean) / sqrt(variance + 1e-8) over the tokens that count, of all ranks; 0 elsewhere.

    All ranks call. The variance is divided by n - 1. Source: verl's masked_whiten. Difference: a
    single token has 0, where verl refuses it.
    """
    counted_T = np.where(mask_T, values_T, 0.0)
    tokens, total = ranks.total(np.array([np.count_nonzero(mask_T), counted_T.sum()]))
    centred_T = np.where(mask_T, values_T - total / max(tokens, 1.0), 0.0)
    (square,) = ranks.total(np.array([(centred_T**2).sum()]))
    white_T: Floats = centred_T / np.sqrt(square / max(tokens - 1.0, 1.0) + VARIANCE_EPSILON)
    return white_T
