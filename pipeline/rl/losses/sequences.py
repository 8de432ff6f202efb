"""Losses with one probability ratio for all tokens of a sample: GSPO and GMPO.

Letters: T response tokens of a micro-batch that this rank holds; S samples of the micro-batch.
"""

from pipeline.rl.losses.ratio import report, weighted
from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss

_LARGEST_LOG_RATIO = 10.0
"""verl's bound of GSPO's log-ratio, against overflow."""


def gspo(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """Clip the geometric mean of a sample's probability ratios (GSPO-token).

    With s = exp(mean over the sample's tokens of log(new / old)), and for each token
    s_t = sg[s] new_t / sg[new_t], which has the value s and the gradient of one token:
    L_t = max(-A_t s_t, -A_t clip(s_t, 1 - clip_low, 1 + clip_high)).
    With equal advantages in a sample the gradient is that of GSPO, whose loss is
    max(-A s, -A clip(s)) per sample, once tokens are averaged by sample (seq-mean-token-mean).

    Source: C. Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, equations 5 to 7
    and 13 to 14; the bound of s from verl's compute_policy_loss_gspo.
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
    """Weigh a sample by the geometric mean of its tokens' clipped ratios (GMPO).

    With x = log(new / old), c = clip(x, -clip_low, clip_high), each token takes the smaller of
    A x and A c, i.e. min(x, c) where A > 0 and max(x, c) where A < 0; r is the exponential of their
    mean over the sample, and L = -mean(A) r is the loss of the sample. Each token of it carries L,
    so that their mean is L again (seq-mean-token-mean). Clip ranges are those of the logarithm.

    The paper has one advantage per sample. A token's weight becomes a factor of the sample's loss:
    their geometric mean, as in verl, where a weight of 0 counts as 1e-10.

    Source: Y. Zhao et al., Geometric-Mean Policy Optimization, arXiv 2507.20673, equation 4 and
    algorithm 1; verl's compute_policy_loss_geo_mean, which averages over all samples of a
    micro-batch where this leaves out those without a token that counts.
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
