"""Losses with one probability ratio for all tokens of a sample: GSPO and GMPO.

Dimensions: T is the number of a micro-batch's response tokens on this rank; S is the number of the
    micro-batch's samples.
"""

from pipeline.rl.losses.ratio import report, weighted
from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss

_LARGEST_LOG_RATIO = 10.0
"""verl's upper bound on GSPO's log-ratio, to prevent overflow."""


def gspo(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """GSPO-token's loss, which clips the geometric mean of a sample's probability ratios.

    Let s = exp(mean over the sample's tokens of log(new / old)). For each token t, let
    s_t = sg[s] new_t / sg[new_t], where sg stops the gradient. The value of s_t is s, but its
    gradient comes only from token t. Then
    L_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high)).

    GSPO's loss per sample is max(-A s, -A clip(s)). If all tokens of a sample have the same
    advantage and their losses are averaged per sample (seq-mean-token-mean), L has the same
    gradient as GSPO's loss.

    Source: C. Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, equations 5 to 7
    and 13 to 14; the bound on s comes from verl's compute_policy_loss_gspo.
    """
    log_ratio_T = tokens.logprobs_T - tokens.old_T
    of_sample_T = tokens.samples.spread(tokens.samples.mean(log_ratio_T.detach()))
    log_s_T = of_sample_T + tokens.logprobs_T - tokens.logprobs_T.detach()
    s_T = log_s_T.clamp(max=_LARGEST_LOG_RATIO).exp()
    free_T = -tokens.advantages_T * s_T
    limited_T = -tokens.advantages_T * s_T.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss_T = weighted(tokens, free_T.maximum(limited_T))
    return PolicyLoss(loss_T, report(tokens, clipped=limited_T > free_T))


def geo_mean(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """GMPO's loss, which weights a sample by the geometric mean of its tokens' clipped ratios.

    With x = log(new / old) and c = clip(x, -clip_low, clip_high), each token contributes min(x, c)
    where A > 0 and max(x, c) where A < 0, so that A times the contribution is the smaller of A x
    and A c. Let r be the exponential of the mean of these contributions over the sample. The
    sample's loss is L = -mean(A) r. Each token of the sample has the loss L, so that the mean over
    the tokens is L again (seq-mean-token-mean). The clip range applies to the logarithm.

    The paper assumes one advantage per sample; this function uses the mean over the tokens. As in
    verl, the sample's loss is multiplied by the geometric mean of its tokens' importance weights,
    and a weight of 0 counts as 1e-10.

    Source: Y. Zhao et al., Geometric-Mean Policy Optimization, arXiv 2507.20673, equation 4 and
    algorithm 1; verl's compute_policy_loss_geo_mean. verl averages over all samples of a
    micro-batch; this loss omits samples without a token in the loss.
    """
    samples, advantages_T = tokens.samples, tokens.advantages_T
    log_ratio_T = tokens.logprobs_T - tokens.old_T
    limited_T = log_ratio_T.clamp(-settings.clip_low, settings.clip_high)
    sign_T = advantages_T.sign()
    taken_T = sign_T * (sign_T * log_ratio_T).minimum(sign_T * limited_T)
    ratio_S = samples.mean(taken_T).clamp(max=_LARGEST_LOG_RATIO).exp()
    loss_S = -samples.mean(advantages_T) * ratio_S
    if tokens.weights_T is not None:
        loss_S = loss_S * samples.mean((tokens.weights_T + 1e-10).log()).exp()
    beyond_T = log_ratio_T != limited_T
    return PolicyLoss(
        samples.spread(loss_S),
        report(
            tokens,
            clipped=beyond_T & (advantages_T > 0),
            dual_clipped=beyond_T & (advantages_T < 0),
        ),
    )
