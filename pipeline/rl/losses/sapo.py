"""SAPO's smooth gate. Letters: T response tokens of a micro-batch that this rank holds."""

from pipeline.rl.losses.ratio import log_ratio, report, weighted
from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss


def sapo(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """Let the gradient fade instead of clipping it: L = -A (4 / tau) sigmoid(tau (r - 1)).

    tau is tau_pos where A > 0 and tau_neg elsewhere. At r = 1 the gradient is that of r; it fades
    on both sides. Tokens are averaged by sample (seq-mean-token-mean).

    Source: SAPO, arXiv 2511.20347, equations 5 and 6; verl's compute_policy_loss_sapo.
    """
    ratio_T = log_ratio(tokens).exp()
    advantages_T = tokens.advantages_T
    tau_T = advantages_T.new_full(advantages_T.shape, settings.tau_pos)
    tau_T = tau_T.where(advantages_T > 0, settings.tau_neg)
    gate_T = (tau_T * (ratio_T - 1.0)).sigmoid() * (4.0 / tau_T)
    return PolicyLoss(weighted(tokens, -gate_T * advantages_T), report(tokens))
