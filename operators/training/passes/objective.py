"""The loss of a micro-batch: a weighted sum of policy loss, KL to the reference and entropy.

T is the number of response tokens in a micro-batch. The tokens are concatenated sample by sample.
"""

from dataclasses import dataclass

import torch

from pipeline.config.actor import Actor
from pipeline.config.tree import RunConfig
from pipeline.rl.kl import kl_estimate
from pipeline.rl.loss_table import LOSSES, Loss
from pipeline.rl.losses.aggregate import AggregationMode, Totals, aggregation
from pipeline.rl.losses.formulas import reinforce
from pipeline.rl.losses.types import LossFunction, LossTokens, Samples

Report = dict[str, torch.Tensor]
"""Sums over the micro-batch's tokens that the loss includes, keyed by name; `tokens` is the number
of these tokens."""


@dataclass(frozen=True)
class Objective:
    """The quantity to minimise: policy + kl_loss_coef * KL - entropy_coeff * entropy.

    The KL and the entropy are aggregated over tokens as loss_agg_mode prescribes, and the policy
    loss as `mode` prescribes.
    """

    actor: Actor
    loss: LossFunction
    mode: AggregationMode
    """Aggregation of the policy loss over tokens: the loss's own mode if it has one, else
    loss_agg_mode."""
    scale_factor: float
    """Divisor for a sample's sum in the mode seq-mean-token-sum-norm."""

    @property
    def has_other_divisor(self) -> bool:
        """Whether the KL or entropy is divided by a different number than the policy loss."""
        of_tokens = {mode == "token-mean" for mode in (self.mode, self.actor.loss_agg_mode)}
        return len(of_tokens) > 1 and (self.actor.use_kl_loss or self.actor.entropy_coeff != 0)


@dataclass(frozen=True)
class Targets:
    """The inputs of the loss other than the model's output; float32 [T] unless noted."""

    mask_T: torch.Tensor
    """Whether each token is included in the loss, bool."""
    advantages_T: torch.Tensor
    old_T: torch.Tensor
    """The trainer's log-probs at the start of the step, or the engine's (bypass_mode)."""
    reference_T: torch.Tensor | None
    """The reference's log-probs; None if there is no reference model."""
    weights_T: torch.Tensor | None
    """Importance weights of a mismatch correction; None if not configured."""
    samples: Samples
    """The samples to which the tokens belong."""
    chosen_T: torch.Tensor | None
    """Whether the loss drops or penalises each token, bool; None if the loss chooses no tokens."""


def loss_of(config: RunConfig, own: LossFunction | None = None) -> Loss:
    """Return the loss that a config selects; `own` is the user's loss, if the config names one."""
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "reinforce":
        return Loss(reinforce)
    if own is not None:
        return Loss(own)
    return LOSSES[config.actor_rollout_ref.actor.policy_loss.loss_mode]


def objective_of(config: RunConfig, own: LossFunction | None = None) -> Objective:
    """Return a config's objective; `own` is the user's loss, if the config names one."""
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
    """Return the loss and report for a micro-batch, as Megatron's schedules expect them.

    Megatron divides the sum of all losses by the sum of the policy loss's divisors. If KL
    and entropy have a different divisor, they are first multiplied by the ratio of the two
    divisors.

    Args:
        objective: The quantity to minimise.
        targets: The other inputs of the loss.
        totals: Numbers of tokens and samples in the mini-batch that the loss includes.
        logprobs_T: Log-probs of the response tokens, with a gradient.
        entropy_T: Entropy at each response token.

    Returns:
        The weighted sum over tokens; its divisor, int32; and the report.
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
