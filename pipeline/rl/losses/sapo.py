"""SAPO's loss, which has a smooth gate.

Dimensions: T is the number of a micro-batch's response tokens on this rank.
"""

from pipeline.rl.losses.ratio import log_ratio, report, weighted
from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss


def sapo(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """SAPO's loss, whose gradient fades instead of being clipped.

    L = -A (4 / tau) sigmoid(tau (r - 1)), where r is the probability ratio of a token, and tau is
    tau_pos if the advantage A is positive and tau_neg otherwise. At r = 1, the gradient is that of
    -A r; it fades as r moves away from 1. Tokens are averaged per sample (seq-mean-token-mean).

    Source: SAPO, arXiv 2511.20347, equations 5 and 6; verl's compute_policy_loss_sapo.
    """
    ratio_T = log_ratio(tokens).exp()
    advantages_T = tokens.advantages_T
    tau_T = advantages_T.new_full(advantages_T.shape, settings.tau_pos)
    tau_T = tau_T.where(advantages_T > 0, settings.tau_neg)
    gate_T = (tau_T * (ratio_T - 1.0)).sigmoid() * (4.0 / tau_T)
    return PolicyLoss(weighted(tokens, -gate_T * advantages_T), report(tokens))
