"""Generalized advantage estimation, from the scores of tokens and a critic's values.

Dimensions: X is the number of this rank's samples; T is the number of this rank's response
    tokens, concatenated sample by sample.
"""

import numpy as np

from pipeline.rl.estimators.tokens import whitened
from pipeline.rl.estimators.types import AlgorithmSettings, Estimate, Rollouts


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
