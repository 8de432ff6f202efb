"""The loss of a micro-batch: clipped policy loss, KL to the reference, entropy, importance weight.

Letters: T response tokens of a micro-batch, in a row.
"""

from dataclasses import dataclass

import torch

from pipeline.config.tree import RunConfig
from pipeline.rl.losses import KlEstimator, importance_weight, kl_estimate, policy_loss

Report = dict[str, torch.Tensor]
"""Sums over the tokens of a micro-batch, by name; `tokens` is their number."""


@dataclass(frozen=True)
class Objective:
    """The quantity to minimise: the mean over tokens of
    weight * policy + kl_coeff * KL - entropy_coeff * entropy.
    """

    temperature: float
    clip_low: float
    clip_high: float
    clip_c: float
    entropy_coeff: float
    kl_coeff: float | None
    """None: no reference model."""
    kl_estimator: KlEstimator
    is_threshold: float | None
    """None: no importance weight."""


@dataclass(frozen=True)
class Targets:
    """The values that the loss compares with, float32 [T], and the tokens that count."""

    loss_mask_T: torch.Tensor
    advantages_T: torch.Tensor
    old_T: torch.Tensor
    """The trainer's log-probs at the step's start."""
    engine_T: torch.Tensor
    reference_T: torch.Tensor | None


def objective_of(config: RunConfig) -> Objective:
    """The objective of a config."""
    actor = config.actor_rollout_ref.actor
    correction = config.algorithm.rollout_correction
    return Objective(
        temperature=config.actor_rollout_ref.rollout.temperature,
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        entropy_coeff=actor.entropy_coeff,
        kl_coeff=actor.kl_loss_coef if actor.use_kl_loss else None,
        kl_estimator=actor.kl_loss_type,
        is_threshold=correction.rollout_is_threshold if correction.rollout_is else None,
    )


def loss_and_report(
    objective: Objective, targets: Targets, logprobs_T: torch.Tensor, entropy_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """Sum over tokens, number of tokens (int32) and report, as Megatron's schedules expect them."""
    mask_T = targets.loss_mask_T

    def total(numbers_T: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_T, numbers_T, 0).sum()

    policy = policy_loss(
        logprobs_T,
        targets.old_T,
        targets.advantages_T,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        clip_c=objective.clip_c,
    )
    policy_T = policy.loss_T
    report = {
        "tokens": mask_T.sum(),
        "clipped": total(policy.clipped_T),
        "dual_clipped": total(policy.dual_clipped_T),
        "log_ratio": total(policy.log_ratio_T),
        "entropy": total(entropy_T),
    }
    if objective.is_threshold is not None:
        weight_T = importance_weight(targets.old_T, targets.engine_T, objective.is_threshold)
        policy_T = policy_T * weight_T
        report["is_weight"] = total(weight_T)
    report["policy"] = total(policy_T)
    loss = report["policy"] - objective.entropy_coeff * report["entropy"]
    if objective.kl_coeff is not None and targets.reference_T is not None:
        report["kl"] = total(kl_estimate(logprobs_T, targets.reference_T, objective.kl_estimator))
        loss = loss + objective.kl_coeff * report["kl"]
    return loss, report["tokens"].int(), {name: x.detach() for name, x in report.items()}
