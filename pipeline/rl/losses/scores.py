"""Losses that multiply the gradient of a token's log-prob by a number: GPG, CISPO, DPPO.

In the formulas, new and old are the token's probabilities under the weights being trained and under
those at the step's start, r is new / old, A is the advantage, and sg[x] is x without gradient.

Dimensions: T is the number of a micro-batch's response tokens on this rank.
"""

from pipeline.rl.losses.ratio import log_ratio, report, weighted
from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss, Tensor

_EPSILON = 1e-8
"""verl's guard against a logarithm of 0."""


def gpg(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """The policy gradient without a ratio or clipping: L = -A log(new).

    Source: X. Chu et al., GPG: A Simple and Strong Reinforcement Learning Baseline for Model
    Reasoning, arXiv 2504.02546, equation 5. The paper's scaling of the advantages (alpha) is part
    of the advantage estimator `gpg`.
    """
    del settings  # this loss has no settings
    return PolicyLoss(weighted(tokens, -tokens.logprobs_T * tokens.advantages_T), report(tokens))


def cispo(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """CISPO's loss, which clips the weight of a token rather than its update.

    L = -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log(new). Every token has a gradient, even if
    its ratio r is out of range. The paper clips r only from above, which clip_ratio_low=1 achieves.

    Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5; verl's compute_policy_loss_cispo.
    """
    ratio_T = log_ratio(tokens).exp().detach()
    clipped_T = ratio_T.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    loss_T = -clipped_T * tokens.advantages_T * tokens.logprobs_T
    return PolicyLoss(weighted(tokens, loss_T), report(tokens, clipped=ratio_T != clipped_T))


def dppo_tv(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """DPPO with binary total variation: no loss on tokens whose probability moved too far.

    L = -A sg[min(r, clip_ratio_c)] log(new). L is 0 where new - old > clip_high (A > 0) or
    old - new > clip_low (A <= 0), because the update would increase this difference between the
    probabilities. The paper truncates r at 20; clip_ratio_c has verl's default of 3.

    Source: DPPO, arXiv 2602.04879, section 4; verl's compute_policy_loss_dppo_tv.
    """
    moved_T = (tokens.logprobs_T.exp() - tokens.old_T.exp()).detach()
    rising_T, falling_T = moved_T <= settings.clip_high, moved_T >= -settings.clip_low
    return _dppo(tokens, settings, rising_T, falling_T)


def dppo_kl(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """DPPO with a binary KL divergence, which distinguishes only the sampled token from the others.

    The loss has the form of `dppo_tv`. It is 0 for tokens whose divergence KL(old || new) is above
    clip_high (A > 0) or clip_low (A <= 0), if the update would increase the divergence.

    Source: DPPO, arXiv 2602.04879, section 4; verl's compute_policy_loss_dppo_kl.
    """
    new_T, old_T = tokens.logprobs_T.exp().detach(), tokens.old_T.exp()
    others_T = ((1.0 - old_T + _EPSILON) / (1.0 - new_T + _EPSILON)).log()
    kl_T = old_T * (tokens.old_T - tokens.logprobs_T.detach()) + (1.0 - old_T) * others_T
    rising_T = (kl_T <= settings.clip_high) | (new_T <= old_T)
    falling_T = (kl_T <= settings.clip_low) | (new_T >= old_T)
    return _dppo(tokens, settings, rising_T, falling_T)


def _dppo(
    tokens: LossTokens, settings: LossSettings, rising_T: Tensor, falling_T: Tensor
) -> PolicyLoss:
    ratio_T = log_ratio(tokens).exp().detach()
    kept_T = rising_T.where(tokens.advantages_T > 0, falling_T)
    truncated_T = ratio_T.clamp(max=settings.clip_ratio_c)
    loss_T = -tokens.advantages_T * truncated_T * tokens.logprobs_T * kept_T
    reports = report(
        tokens, clipped=~kept_T, dual_clipped=(ratio_T > settings.clip_ratio_c) & kept_T
    )
    return PolicyLoss(weighted(tokens, loss_T), reports)
