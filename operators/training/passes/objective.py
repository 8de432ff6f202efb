"""The loss of a micro-batch: policy loss, KL to the reference and entropy, made one number.

Letters: T response tokens of a micro-batch, in a row.
"""

from dataclasses import dataclass

import torch

from pipeline.config.actor import Actor
from pipeline.config.tree import RunConfig
from pipeline.rl.loss_table import LOSSES, Loss
from pipeline.rl.losses.aggregate import AggregationMode, Totals, aggregation
from pipeline.rl.losses.kl import kl_estimate
from pipeline.rl.losses.reinforce import reinforce
from pipeline.rl.losses.types import LossFunction, LossTokens, Samples

Report = dict[str, torch.Tensor]
"""Sums over the tokens of a micro-batch, by name; `tokens` is their number."""


@dataclass(frozen=True)
class Objective:
    """The quantity to minimise: policy + kl_loss_coef * KL - entropy_coeff * entropy.

    KL and entropy become one number as loss_agg_mode has it, the policy loss by its own mode.
    """

    actor: Actor
    loss: LossFunction
    mode: AggregationMode
    """How the policy loss becomes one number: loss_agg_mode, or the loss's own mode."""
    scale_factor: float
    """Divisor of a sample's sum in seq-mean-token-sum-norm."""


@dataclass(frozen=True)
class Targets:
    """The values that the loss compares with, float32 [T], and the tokens that count."""

    mask_T: torch.Tensor
    advantages_T: torch.Tensor
    old_T: torch.Tensor
    """The trainer's log-probs at the step's start, or the engine's (bypass_mode)."""
    reference_T: torch.Tensor | None
    weights_T: torch.Tensor | None
    samples: Samples
    chosen_T: torch.Tensor | None
    """The tokens that the loss treats apart; None: it chooses none."""


def loss_of(config: RunConfig, own: LossFunction | None = None) -> Loss:
    """The loss of a config; `own` is the user's function that it names, if it names one."""
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "reinforce":
        return Loss(reinforce)
    if own is not None:
        return Loss(own)
    return LOSSES[config.actor_rollout_ref.actor.policy_loss.loss_mode]


def objective_of(config: RunConfig, own: LossFunction | None = None) -> Objective:
    """The objective of a config; `own` is the user's loss that it names, if it names one."""
    actor = config.actor_rollout_ref.actor
    loss = loss_of(config, own)
    return Objective(
        actor=actor,
        loss=loss.function,
        mode=loss.aggregation or actor.loss_agg_mode,
        scale_factor=actor.loss_scale_factor or config.data.max_response_length,
    )


def loss_and_report(
    objective: Objective,
    targets: Targets,
    totals: Totals,
    logprobs_T: torch.Tensor,
    entropy_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """Weighted sum over tokens, its divisor (int32) and report, as Megatron's schedules expect.

    `totals` are those of the mini-batch. Megatron divides by the divisors of the policy loss, so
    KL and entropy are multiplied by them where theirs are others.
    """
    actor, mask_T = objective.actor, targets.mask_T
    tokens = LossTokens(
        logprobs_T=logprobs_T,
        old_T=targets.old_T,
        advantages_T=targets.advantages_T,
        mask_T=mask_T,
        entropy_T=entropy_T,
        weights_T=targets.weights_T,
        samples=targets.samples,
        chosen_T=targets.chosen_T,
    )
    policy = objective.loss(tokens, actor)
    of_policy = aggregation(objective.mode, tokens, objective.scale_factor)
    of_others = aggregation(actor.loss_agg_mode, tokens, objective.scale_factor)
    share = totals.divisor(objective.mode) / max(totals.divisor(actor.loss_agg_mode), 1)

    def total(numbers_T: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_T, numbers_T, 0).sum()

    report = {"tokens": mask_T.sum(), "divisor": of_policy.divisor, "entropy": total(entropy_T)}
    report |= {name: total(values_T) for name, values_T in policy.reports.items()}
    report["policy"] = total(policy.loss_T * of_policy.weights_T)
    loss = report["policy"]
    loss = loss - actor.entropy_coeff * share * total(entropy_T * of_others.weights_T)
    if targets.reference_T is not None and actor.use_kl_loss:
        kl_T = kl_estimate(logprobs_T, targets.reference_T, actor.kl_loss_type)
        report["kl"] = share * total(kl_T * of_others.weights_T)
        loss = loss + actor.kl_loss_coef * report["kl"]
    return loss, of_policy.divisor, {name: x.detach() for name, x in report.items()}
