"""The loss of a micro-batch: clipped policy loss, KL to the reference, entropy, importance weight.

Letters: B rows, N positions, V this rank's part of the vocabulary.
"""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from operators.training.passes.logprobs import logprobs_and_entropy
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
    """The values that the loss compares with, float32 [B, N], and the positions that count."""

    labels_BN: torch.Tensor
    loss_mask_BN: torch.Tensor
    advantages_BN: torch.Tensor
    old_BN: torch.Tensor
    """The trainer's log-probs at the step's start."""
    engine_BN: torch.Tensor
    reference_BN: torch.Tensor | None


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
    objective: Objective, targets: Targets, logits_BNV: torch.Tensor, tensor_group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """Sum over tokens, number of tokens (int32) and report, as Megatron's schedules expect them."""
    logprobs_BN, entropy_BN = logprobs_and_entropy(
        logits_BNV, targets.labels_BN, objective.temperature, tensor_group
    )
    mask_BN = targets.loss_mask_BN

    def total(numbers_BN: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_BN, numbers_BN, 0).sum()

    policy = policy_loss(
        logprobs_BN,
        targets.old_BN,
        targets.advantages_BN,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        clip_c=objective.clip_c,
    )
    policy_BN = policy.loss_BN
    report = {
        "tokens": mask_BN.sum(),
        "clipped": total(policy.clipped_BN),
        "dual_clipped": total(policy.dual_clipped_BN),
        "log_ratio": total(policy.log_ratio_BN),
        "entropy": total(entropy_BN),
    }
    if objective.is_threshold is not None:
        weight_BN = importance_weight(targets.old_BN, targets.engine_BN, objective.is_threshold)
        policy_BN = policy_BN * weight_BN
        report["is_weight"] = total(weight_BN)
    report["policy"] = total(policy_BN)
    loss = report["policy"] - objective.entropy_coeff * report["entropy"]
    if objective.kl_coeff is not None and targets.reference_BN is not None:
        report["kl"] = total(kl_estimate(logprobs_BN, targets.reference_BN, objective.kl_estimator))
        loss = loss + objective.kl_coeff * report["kl"]
    return loss, report["tokens"].int(), {name: x.detach() for name, x in report.items()}
