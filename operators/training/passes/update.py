"""The updates of a step: one optimizer step per mini-batch, with or without replay."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.optimizer import MegatronOptimizer

from operators.training.batches.layout import MiniBatch
from operators.training.batches.micro_batch import MicroBatch, ResponseTokens
from operators.training.batches.step_data import StepData
from operators.training.errors import UpdateError
from operators.training.megatron.optimizer import checked_step
from operators.training.megatron.schedules import training_pass
from operators.training.passes.chosen import chosen_tokens
from operators.training.passes.compared import Compared, corrected_batch
from operators.training.passes.custom_loss import checked
from operators.training.passes.flat import BySample
from operators.training.passes.logprob_pass import logprobs_of
from operators.training.passes.objective import (
    Report,
    Targets,
    loss_and_report,
    loss_of,
    objective_of,
)
from operators.training.passes.samples import SamplesOfBatch
from operators.training.passes.share import lay_out_share, make_replayers, response_logprobs
from operators.training.passes.totals import totals_of
from operators.training.rank import Rank, Skipped
from operators.training.replay.counts import Counts, added, counts_of
from operators.training.replay.hooks import Replayer, bound
from pipeline import progress
from pipeline.config.optim import Optim
from pipeline.config.rules.rates import OPTIM
from pipeline.rl.corrections.tally import Tally
from pipeline.traces.format.types import Routes

logger = logging.getLogger(__name__)

_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
MOST_SKIPPED = 3
"""Mini-batches in a row whose gradients may be not finite; after more the weights are to blame."""


@dataclass
class Updates:
    """The results of a step's updates on this rank."""

    sums: list[dict[str, float]] = field(default_factory=list)
    """Per mini-batch that was not skipped: sums over this data-parallel rank's tokens; [{}, ...]
    off the last stage."""
    grad_norms: list[float] = field(default_factory=list)
    """Per mini-batch that was not skipped, before clipping, of the whole model."""
    skipped: int = 0
    """Mini-batches whose gradients were not finite."""
    empty: int = 0
    """Mini-batches without a token that counts, skipped as well."""
    counts: list[Counts] = field(default_factory=list)
    """Counts of replay, by epoch."""
    lr: float = 0.0
    """The step's learning rate."""
    tallies: list[Tally] = field(default_factory=list)
    """What the corrections of each micro-batch found, where they are made here (bypass_mode)."""


def update(
    rank: Rank, data: StepData, compared: Compared, routes: Mapping[str, Routes] | None
) -> Updates:
    """Train on a step's samples; every pass replays `routes`; None: native routing.

    A mini-batch whose gradients are not finite is skipped where the settings allow it: weights and
    optimizer stay as they are, and it is no part of the sums. Raises UpdateError where they do not,
    or for too many in a row; ReplayError when a pass did not use its routes exactly once. One
    without a token that counts is always skipped: momentum and weight decay would change weights.
    """
    updates = Updates(lr=rank.rates.set(data.step))
    optim = rank.config.actor_rollout_ref.actor.optim
    progress.say(f"step {data.step}: updates", len(data.layout.mini_batches), "mini-batches")
    place = f"step {data.step}, mini-batch {{}}"
    optimizer_steps(
        rank,
        data.layout.mini_batches,
        lambda batch: gradients(rank, data, batch, compared, routes, updates.tallies),
        SteppedModel(rank.optimizer, rank.skipped, optim, OPTIM, place),
        updates,
    )
    return updates


@dataclass(frozen=True)
class SteppedModel:
    """The model that optimizer steps change: the policy or its critic."""

    optimizer: MegatronOptimizer
    skipped: Skipped
    optim: Optim
    name: str
    """Of the settings in `optim`."""
    place: str
    """How a message names a mini-batch; {} stands for its number."""


def optimizer_steps(
    rank: Rank,
    mini_batches: Sequence[MiniBatch],
    gradients_of: Callable[[MiniBatch], tuple[list[Report], Counts]],
    model: SteppedModel,
    updates: Updates,
) -> None:
    """Make gradients and an optimizer step of each mini-batch, and add them to `updates`.

    See `update` for what is skipped. Raises UpdateError, ReplayError.
    """
    of_epoch: dict[int, list[Counts]] = defaultdict(list)
    for number, mini_batch in enumerate(progress.counted(mini_batches)):
        reports, counts = gradients_of(mini_batch)
        of_epoch[mini_batch.epoch].append(counts)
        if not _any_token(rank, reports):
            updates.empty += 1
            continue
        done, grad_norm = checked_step(model.optimizer)
        if done:
            model.skipped.in_a_row = 0
            updates.sums.append(_sums(reports))
            updates.grad_norms.append(grad_norm)
        else:
            updates.skipped += 1
            what = f"{model.place.format(number)}: gradient norm {grad_norm}"
            _skip(model.skipped, model.optim, model.name, what)
    updates.counts = [added(of_epoch[epoch]) for epoch in sorted(of_epoch)]


def _any_token(rank: Rank, reports: Sequence[Report]) -> bool:
    """Whether a token of the mini-batch counts, on any rank. All ranks call, and all get the same:
    only the last stage has reports."""
    tokens = torch.tensor(
        sum(int(report["tokens"]) for report in reports),
        device=next(rank.chunks[0].parameters()).device,
    )
    torch.distributed.all_reduce(tokens, op=torch.distributed.ReduceOp.MAX)
    return bool(tokens)


def _skip(skipped: Skipped, optim: Optim, name: str, what: str) -> None:
    """Count a skipped mini-batch, equally on all ranks; `name`: of the settings in `optim`.

    Raises UpdateError.
    """
    skipped.in_a_row += 1
    if optim.skip_nonfinite:
        if skipped.in_a_row <= MOST_SKIPPED:
            logger.warning("%s; it is skipped (counted as update/skipped)", what)
            return
        reason = f"the last {skipped.in_a_row} mini-batches had none that is finite"
    else:
        reason = f"{name}.skip_nonfinite=False"
    raise UpdateError(
        f"{what}, {reason}; nothing of the step is stored. Start a new run with a smaller learning "
        "rate, and look at the rewards and log-probs of this step"
    )


def gradients(
    rank: Rank,
    data: StepData,
    mini_batch: MiniBatch,
    compared: Compared,
    routes: Mapping[str, Routes] | None,
    tallies: list[Tally] | None = None,
) -> tuple[list[Report], Counts]:
    """Run forward and backward of a mini-batch, leaving gradients in the model's buffers.

    Returns reports by micro-batch (last stage) and the counts of replay; what corrections of a
    micro-batch find is appended to `tallies`. With bypass_mode tokens are rejected after their
    forward pass: totals are of those that counted before.
    """
    batches = lay_out_share(rank, data, mini_batch, routes)
    own = rank.functions.get(_LOSS)
    objective = objective_of(rank.config, own)
    totals, positions = totals_of(rank, data, mini_batch, compared)
    chosen = _chosen(rank, data, mini_batch, compared, batches, routes)
    replayers: dict[int, Replayer] = {}
    if routes is not None and rank.geometry is not None:
        replayers = make_replayers(rank.geometry, batches)

    def loss(index: int, hidden_BMH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Report]:
        response = batches[index].response
        made = response_logprobs(
            rank,
            rank.chunks,
            response,
            hidden_BMH,
            entropy_gradient=objective.actor.entropy_coeff != 0,
        )
        of_batch = compared
        if rank.config.algorithm.rollout_correction.bypass_mode:
            of_batch, tally = corrected_batch(rank, data, response, made[0], compared)
            if tallies is not None:
                tallies.append(tally)
        targets = _targets(rank, response, of_batch, chosen, hidden_BMH.device)
        this = objective
        if own is not None:
            where = f"step {data.step}: {_LOSS}={objective.actor.policy_loss.loss_mode}"
            this = replace(objective, loss=checked(own, where, response))
        return loss_and_report(this, targets, totals, *made)

    rank.optimizer.zero_grad()
    with bound(rank.routers if replayers else {}, replayers, forward_only=False):
        scale = auxiliary_scale(totals.divisor(objective.mode), positions)
        reports = training_pass(rank.chunks, batches, loss, rank.with_padding_mask, scale)
    return reports, counts_of(replayers)


def auxiliary_scale(divisor: int, positions: int) -> float:
    """The factor of the routers' auxiliary losses, from a mini-batch's divisor and positions.

    Megatron sums auxiliary losses times the tokens that they count (prompts too, without padding),
    and divides by the divisor as it does the loss. With this factor the mini-batch's auxiliary loss
    is the mean of its micro-batches', weighed by their tokens, however the loss is averaged.

    Megatron-core 0.16.1 counts the tokens of all ranks that share a micro-batch only where it has a
    padding mask (reduce_from_tensor_model_parallel_region then changes the rank's own counts in
    place), else the rank's own alone. It always has one here: Rank.with_padding_mask.
    """
    return divisor / positions


def _chosen(
    rank: Rank,
    data: StepData,
    mini_batch: MiniBatch,
    compared: Compared,
    batches: Sequence[MicroBatch],
    routes: Mapping[str, Routes] | None,
) -> BySample | None:
    """The tokens that the loss treats apart, from one more forward pass. All ranks call.

    None: the loss chooses none, or this is not the last pipeline stage.
    """
    choose = loss_of(rank.config, rank.functions.get(_LOSS)).choose
    if choose is None:
        return None
    current = logprobs_of(rank, batches, routes)
    if not rank.position.last_stage:
        return None
    return chosen_tokens(rank, data, mini_batch, compared, choose, current)


def _targets(
    rank: Rank,
    response: ResponseTokens,
    compared: Compared,
    chosen: BySample | None,
    device: torch.device,
) -> Targets:
    def uploaded(values: Mapping[str, npt.NDArray[Any]], dtype: type = np.float32) -> torch.Tensor:
        return torch.from_numpy(response.joined(values, dtype)).to(device)

    mask_T = uploaded(compared.mask, np.bool_)
    reference, weights = compared.reference, compared.weights
    return Targets(
        mask_T=mask_T,
        advantages_T=uploaded(compared.advantages),
        old_T=uploaded(compared.old),
        reference_T=None if reference is None else uploaded(reference),
        weights_T=None if weights is None else uploaded(weights),
        samples=SamplesOfBatch(rank, response, mask_T),
        chosen_T=None if chosen is None else uploaded(chosen, np.bool_),
    )


def _sums(reports: Sequence[Report]) -> dict[str, float]:
    """The sums of a mini-batch's reports, by name."""
    sums: dict[str, float] = {}
    for report in reports:
        for name, value in report.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums
