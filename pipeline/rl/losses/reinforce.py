"""REINFORCE on samples of another policy: the loss of bypass_mode with loss_type=reinforce."""

from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss


def reinforce(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """L = -A w log p, whose gradient is that of -A log p times the weight w, which has none itself.

    w is p_trainer / p_engine of the token or its sequence, cut as rollout_is_threshold has it; 1
    without rollout_is. `tokens.old_T` are the engine's log-probs. Nothing is clipped.

    Source: R. J. Williams, Simple statistical gradient-following algorithms (1992); J. Liu et al.,
    When speed kills stability (2025); verl's compute_policy_loss_reinforce.
    """
    loss_T = -tokens.advantages_T * tokens.logprobs_T
    return PolicyLoss(
        loss_T if tokens.weights_T is None else loss_T * tokens.weights_T,
        {"log_ratio": (tokens.logprobs_T - tokens.old_T).clamp(min=-20.0, max=20.0)},
    )
