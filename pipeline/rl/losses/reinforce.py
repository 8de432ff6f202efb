"""REINFORCE on another policy's samples: the loss of bypass_mode with loss_type=reinforce."""

from pipeline.rl.losses.types import LossSettings, LossTokens, PolicyLoss


def reinforce(tokens: LossTokens, settings: LossSettings) -> PolicyLoss:
    """REINFORCE with importance weights: L = -A w log p, with no gradient through the weight w.

    w is p_trainer / p_engine of the token or its sequence, clipped by rollout_is_threshold; without
    rollout_is, w is 1. `tokens.old_T` contains the engine's log-probs. The loss itself is not
    clipped.

    Source: R. J. Williams, Simple statistical gradient-following algorithms (1992); J. Liu et al.,
    When speed kills stability (2025); verl's compute_policy_loss_reinforce.
    """
    loss_T = -tokens.advantages_T * tokens.logprobs_T
    return PolicyLoss(
        loss_T if tokens.weights_T is None else loss_T * tokens.weights_T,
        {"log_ratio": (tokens.logprobs_T - tokens.old_T).clamp(min=-20.0, max=20.0)},
    )
