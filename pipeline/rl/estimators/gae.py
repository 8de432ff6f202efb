"""Advantages by generalized advantage estimation, from the rewards and a critic's values of tokens.

Letters: X samples of this rank, T response tokens of this rank, sample after sample.
"""

import numpy as np

from pipeline.rl.estimators.tokens import whitened
from pipeline.rl.estimators.types import AlgorithmSettings, Estimate, Rollouts


def gae(rollouts: Rollouts, settings: AlgorithmSettings) -> Estimate:
    """GAE: A_t = d_t + gamma lam A_(t+1) with d_t = s_t + gamma V_(t+1) - V_t, where
    V and A are 0 beyond the end.

    Returns are A + V; the advantages are then whitened over all tokens of the step.

    Tokens that do not count (an environment's) are no steps in time: t + 1 is the next that counts.
    Source: arXiv 1506.02438; verl's compute_gae_advantage_return. Differences: the scores of tokens
    that do not count are added to the token before, not dropped, as the reward of a response that
    ends with such tokens stands at the last; and see `whitened`. Raises ValueError without values.
    """
    values_T = rollouts.values_T
    if values_T is None:
        raise ValueError("gae: the step has no values; it needs a critic")
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
