"""Advantages per token: discounted returns, whitened over all tokens of the step, and ReMax.

Samples with a reward of NaN and tokens excluded from the loss are not trained on, and no statistic
includes them. A token's score is its reward minus its KL penalty (see `reward_kl`).

Dimensions: N is the number of a step's samples, X the number of this rank's samples, and T the
    number of this rank's response tokens.
"""

import numpy as np
import numpy.typing as npt

from pipeline.rl.estimators.group import Groups, sample_scores
from pipeline.rl.estimators.types import AlgorithmSettings, Estimate, Floats, Ranks, Rollouts

VARIANCE_EPSILON = 1e-8
"""The number added to the variance in whitening, as in verl."""


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
    scores_N = sample_scores(rollouts)
    centred_N = Groups.of(rollouts.groups_N, scores_N).centred_N(scores_N)
    centred_T = rollouts.of_tokens(centred_N)
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
