"""The loss of a micro-batch: policy loss, KL to the reference and entropy, made one number.

Letters: T response tokens of a micro-batch, in a row.
"""

from dataclasses import dataclass

import torch

from pipeline.config.actor import Actor
from pipeline.config.tree import RunConfig
from pipeline.rl.loss_table import LOSSES
from pipeline.rl.losses.aggregate import aggregation
from pipeline.rl.losses.kl import kl_estimate
from pipeline.rl.losses.types import LossFunction, LossTokens, Samples

Report = dict[str, torch.Tensor]
"""Sums over the tokens of a micro-batch, by name; `tokens` is their number."""


@dataclass(frozen=True)
class Objective:
    """The quantity to minimise: policy + kl_loss_coef * KL - entropy_coeff * entropy, each token's
    made one number as loss_agg_mode has it.
    """

    actor: Actor
    loss: LossFunction
    scale_factor: float
    """Divisor of a sample's sum in seq-mean-token-sum-norm."""


@dataclass(frozen=True)
class Targets:
    """The values that the loss compares with, float32 [T], and the tokens that count."""

    mask_T: torch.Tensor
    advantages_T: torch.Tensor
    old_T: torch.Tensor
    """The trainer's log-probs at the step's start."""
    reference_T: torch.Tensor | None
    weights_T: torch.Tensor | None
    samples: Samples


def objective_of(config: RunConfig) -> Objective:
    """The objective of a config."""
    return Objective(
        actor=config.actor_rollout_ref.actor,
        loss=LOSSES["vanilla"],
        scale_factor=config.data.max_response_length,
    )


def loss_and_report(
    objective: Objective, targets: Targets, logprobs_T: torch.Tensor, entropy_T: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """Weighted sum over tokens, its divisor (int32) and report, as Megatron's schedules expect."""
    actor, mask_T = objective.actor, targets.mask_T
    tokens = LossTokens(
        logprobs_T=logprobs_T,
        old_T=targets.old_T,
        advantages_T=targets.advantages_T,
        mask_T=mask_T,
        entropy_T=entropy_T,
        weights_T=targets.weights_T,
        samples=targets.samples,
    )
    policy = objective.loss(tokens, actor)
    aggregated = aggregation(actor.loss_agg_mode, tokens, objective.scale_factor)
    weights_T = aggregated.weights_T

    def total(numbers_T: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_T, numbers_T, 0).sum()

    def weighted(numbers_T: torch.Tensor) -> torch.Tensor:
        return total(numbers_T if weights_T is None else numbers_T * weights_T)

    report = {"tokens": mask_T.sum(), "divisor": aggregated.divisor, "entropy": total(entropy_T)}
    report |= {name: total(values_T) for name, values_T in policy.reports.items()}
    if targets.weights_T is not None:
        report["is_weight"] = total(targets.weights_T)
    report["policy"] = weighted(policy.loss_T)
    loss = report["policy"] - actor.entropy_coeff * weighted(entropy_T)
    if targets.reference_T is not None and actor.use_kl_loss:
        report["kl"] = weighted(kl_estimate(logprobs_T, targets.reference_T, actor.kl_loss_type))
        loss = loss + actor.kl_loss_coef * report["kl"]
    return loss, aggregated.divisor, {name: x.detach() for name, x in report.items()}
