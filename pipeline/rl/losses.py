"""Losses per token, on tensors of any library whose tensors have torch's methods.

This module imports no tensor library and uses methods only, so that `pipeline` stays light. All
arguments and results have one shape, written `_BN` (B samples, N positions), float32.
Nothing here is masked or averaged: the caller multiplies by its loss mask, sums, and divides by
the mini-batch's number of tokens (verl's loss_agg_mode token-mean).
"""

from dataclasses import dataclass
from typing import Any, Literal

Tensor = Any
"""A tensor with torch's methods (exp, clamp, maximum, minimum, where, square, abs, detach)."""

KlEstimator = Literal["low_var_kl", "kl", "mse", "abs"]


@dataclass(frozen=True)
class PolicyLoss:
    """The clipped policy loss and where it was clipped."""

    loss_BN: Tensor
    clipped_BN: Tensor
    """Bool: the clip range changed the loss (verl's pg_clipfrac)."""
    dual_clipped_BN: Tensor
    """Bool: the dual clip changed the loss (verl's pg_clipfrac_lower)."""
    log_ratio_BN: Tensor
    """log(new / old), clamped to +-20 against overflow, as in verl."""


def policy_loss(
    logprobs_BN: Tensor,
    old_logprobs_BN: Tensor,
    advantages_BN: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLoss:
    """PPO's clipped loss with dual clip.

    With r = exp(logprobs - old_logprobs):
    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), and min(L, -A clip_c) where A < 0.

    Source: PPO, arXiv 1707.06347; dual clip, arXiv 1912.09729; asymmetric range, DAPO,
    arXiv 2503.14476; the same arithmetic as verl's compute_policy_loss_vanilla.
    """
    log_ratio_BN = (logprobs_BN - old_logprobs_BN).clamp(min=-20.0, max=20.0)
    ratio_BN = log_ratio_BN.exp()
    free_BN = -advantages_BN * ratio_BN
    limited_BN = -advantages_BN * ratio_BN.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped_BN = free_BN.maximum(limited_BN)
    bound_BN = -advantages_BN * clip_c
    negative_BN = advantages_BN < 0
    return PolicyLoss(
        loss_BN=clipped_BN.minimum(bound_BN).where(negative_BN, clipped_BN),
        clipped_BN=limited_BN > free_BN,
        dual_clipped_BN=(clipped_BN > bound_BN) & negative_BN,
        log_ratio_BN=log_ratio_BN,
    )


def kl_estimate(logprobs_BN: Tensor, reference_BN: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) at each sampled token, from the two log-probs.

    With d = reference - policy: kl (k1) is -d, abs is |d|, mse (k2) is d^2 / 2, low_var_kl (k3)
    is exp(d) - d - 1 with d clamped to +-20 and the result to +-10.

    Source: J. Schulman, Approximating KL divergence (2020); clamps from verl's kl_penalty.
    """
    difference_BN = reference_BN - logprobs_BN
    if estimator == "kl":
        return -difference_BN
    if estimator == "abs":
        return difference_BN.abs()
    if estimator == "mse":
        return 0.5 * difference_BN.square()
    difference_BN = difference_BN.clamp(min=-20.0, max=20.0)
    return (difference_BN.exp() - difference_BN - 1.0).clamp(min=-10.0, max=10.0)


def importance_weight(old_logprobs_BN: Tensor, engine_BN: Tensor, threshold: float) -> Tensor:
    """Truncated importance sampling: min(exp(old - engine), threshold), without gradient.

    `old_logprobs_BN` are the trainer's at the step's start, `engine_BN` those of the distribution
    that was sampled from. The log-ratio is clamped to +-20 against overflow, as in verl.

    Source: F. Yao et al., Your efficient RL framework secretly brings you off-policy RL training
    (2025); verl's algorithm.rollout_correction with rollout_is=token.
    """
    log_ratio_BN = (old_logprobs_BN - engine_BN).clamp(min=-20.0, max=20.0)
    return log_ratio_BN.exp().clamp(max=threshold).detach()
