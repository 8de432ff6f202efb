"""Losses per token, on tensors of any library whose tensors have torch's methods.

This module imports no tensor library and uses methods only, so that `pipeline` stays light. All
arguments and results have one shape, written `_T` (tokens in a row), float32.
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

    loss_T: Tensor
    clipped_T: Tensor
    """Bool: the clip range changed the loss (verl's pg_clipfrac)."""
    dual_clipped_T: Tensor
    """Bool: the dual clip changed the loss (verl's pg_clipfrac_lower)."""
    log_ratio_T: Tensor
    """log(new / old), clamped to +-20 against overflow, as in verl."""


def policy_loss(
    logprobs_T: Tensor,
    old_logprobs_T: Tensor,
    advantages_T: Tensor,
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
    log_ratio_T = (logprobs_T - old_logprobs_T).clamp(min=-20.0, max=20.0)
    ratio_T = log_ratio_T.exp()
    free_T = -advantages_T * ratio_T
    limited_T = -advantages_T * ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped_T = free_T.maximum(limited_T)
    bound_T = -advantages_T * clip_c
    negative_T = advantages_T < 0
    return PolicyLoss(
        loss_T=clipped_T.minimum(bound_T).where(negative_T, clipped_T),
        clipped_T=limited_T > free_T,
        dual_clipped_T=(clipped_T > bound_T) & negative_T,
        log_ratio_T=log_ratio_T,
    )


def kl_estimate(logprobs_T: Tensor, reference_T: Tensor, estimator: KlEstimator) -> Tensor:
    """KL(policy || reference) at each sampled token, from the two log-probs.

    With d = reference - policy: kl (k1) is -d, abs is |d|, mse (k2) is d^2 / 2, low_var_kl (k3)
    is exp(d) - d - 1 with d clamped to +-20 and the result to +-10.

    Source: J. Schulman, Approximating KL divergence (2020); clamps from verl's kl_penalty.
    """
    difference_T = reference_T - logprobs_T
    if estimator == "kl":
        return -difference_T
    if estimator == "abs":
        return difference_T.abs()
    if estimator == "mse":
        return 0.5 * difference_T.square()
    difference_T = difference_T.clamp(min=-20.0, max=20.0)
    return (difference_T.exp() - difference_T - 1.0).clamp(min=-10.0, max=10.0)


def importance_weight(old_logprobs_T: Tensor, engine_T: Tensor, threshold: float) -> Tensor:
    """Truncated importance sampling: min(exp(old - engine), threshold), without gradient.

    `old_logprobs_T` are the trainer's at the step's start, `engine_T` those of the distribution
    that was sampled from. The log-ratio is clamped to +-20 against overflow, as in verl.

    Source: F. Yao et al., Your efficient RL framework secretly brings you off-policy RL training
    (2025); verl's algorithm.rollout_correction with rollout_is=token.
    """
    log_ratio_T = (old_logprobs_T - engine_T).clamp(min=-20.0, max=20.0)
    return log_ratio_T.exp().clamp(max=threshold).detach()
