"""PPO's clipped loss."""

from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss


def vanilla(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """PPO's clipped loss with dual clip.

    With r = exp(logprobs - old_logprobs), L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)).
    The loss is L, or min(L, -A clip_ratio_c) where A < 0. It is multiplied by the token's
    importance weight, if weights are configured.

    Source: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; asymmetric range, DAPO,
    arXiv 2503.14476. The arithmetic is that of verl's compute_policy_loss_vanilla.
    """
    log_ratio_T = (tokens.logprobs_T - tokens.old_T).clamp(min=-20.0, max=20.0)
    ratio_T = log_ratio_T.exp()
    free_T = -tokens.advantages_T * ratio_T
    limited_T = -tokens.advantages_T * ratio_T.clamp(
        1.0 - settings.clip_low, 1.0 + settings.clip_high
    )
    clipped_T = free_T.maximum(limited_T)
    bound_T = -tokens.advantages_T * settings.clip_ratio_c
    negative_T = tokens.advantages_T < 0
    loss_T = clipped_T.minimum(bound_T).where(negative_T, clipped_T)
    return PolicyLoss(
        loss_T if tokens.weights_T is None else loss_T * tokens.weights_T,
        {
            "clipped": limited_T > free_T,
            "dual_clipped": (clipped_T > bound_T) & negative_T,
            "log_ratio": log_ratio_T,
        },
    )
