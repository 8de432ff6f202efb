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
from operators.training.batches.upload import uploaded
from operators.training.errors import UpdateError
from operators.training.megatron.optimizer import checked_step
from operators.training.megatron.schedules import training_pass
from operators.training.passes.chosen import chosen_tokens
from operators.training.passes.compared import Compared, corrected_batch, without_rejected
from operators.training.passes.custom_loss import checked
from operators.training.passes.flat import BySample
from operators.training.passes.logprob_pass import logprobs_of
from operators.training.passes.objective import (
    Objective,
    Report,
    Targets,
    loss_and_report,
    loss_of,
    objective_of,
)
from operators.training.passes.samples import SamplesOfBatch
from operators.training.passes.share import lay_out_share, make_replay, response_logprobs
from operators.training.passes.totals import totals_of
from operators.training.rank import Rank, Skipped
from operators.training.replay.counts import Counts, added, counts_of
from operators.training.replay.hooks import bound
from pipeline import progress
from pipeline.config.optim import Optim
from pipeline.config.rules.rates import OPTIM
from pipeline.rl.moments import Tally
from pipeline.traces.format.types import Routes

logger = logging.getLogger(__name__)

_LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
MOST_SKIPPED = 3
"""Maximum number of consecutive mini-batches without finite gradients.

More than this indicates broken weights."""


@dataclass
class Updates:
    """The results of a step's updates on this rank."""

    sums: list[dict[str, float]] = field(default_factory=list)
    """Sums over this data-parallel rank's tokens, for each mini-batch that was not skipped; on
    stages before the last, empty dicts."""
    grad_norms: list[float] = field(default_factory=list)
    """Gradient norm over all ranks before clipping, for each mini-batch that was not skipped."""
    skipped: int = 0
    """Number of mini-batches whose gradients were not finite."""
    empty: int = 0
    """Number of mini-batches whose loss includes no tokens; they are also skipped."""
    counts: list[Counts] = field(default_factory=list)
    """Replay counts of each epoch."""
    lr: float = 0.0
    """The step's learning rate."""
    tallies: list[Tally] = field(default_factory=list)
    """Statistics of each micro-batch's corrections, which updates compute only in bypass_mode."""


def update(
    rank: Rank, data: StepData, compared: Compared, routes: Mapping[str, Routes] | None
) -> Updates:
    """Train the policy on a step's samples.

    A skipped mini-batch changes neither the weights nor the optimizer state, and is left out of the
    sums. A mini-batch without finite gradients is skipped if the settings allow it. A mini-batch
    whose loss includes no tokens is always skipped, because momentum and weight decay would
    otherwise change the weights.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        compared: The inputs of the updates.
        routes: Routes to replay in each pass, keyed by sample id; None for native routing.

    Raises:
        UpdateError: A mini-batch's gradients were not finite and the settings forbid skipping it,
            or the gradients of too many consecutive mini-batches were not finite.
        ReplayError: A pass did not use its routes exactly once.
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
    """The model that optimizer steps change: the policy or the critic."""

    optimizer: MegatronOptimizer
    skipped: Skipped
    optim: Optim
    name: str
    """The settings key that `optim` was read from, for error messages."""
    place: str
    """Template for a mini-batch's name in messages; {} is replaced by the mini-batch's number."""


def optimizer_steps(
    rank: Rank,
    mini_batches: Sequence[MiniBatch],
    gradients_of: Callable[[MiniBatch], tuple[list[Report], Counts]],
    model: SteppedModel,
    updates: Updates,
) -> None:
    """Compute the gradients of each mini-batch and take its optimizer step.

    Args:
        rank: This training rank.
        mini_batches: The mini-batches, in order.
        gradients_of: A function that computes the gradients of a mini-batch, and returns its
            reports and its replay counts.
        model: The model to change.
        updates: The results; this function adds each mini-batch's results to them.

    Raises:
        UpdateError: Gradients were not finite, and skipping is not allowed (see `update`).
        ReplayError: A pass did not use its routes exactly once.
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
    """Return whether any rank has a token that this mini-batch's loss includes.

    Every rank must call this collective, because only the last pipeline stage has reports, but all
    ranks need the same answer.
    """
    tokens = sum(
        (report["tokens"] for report in reports),
        torch.zeros((), dtype=torch.int64, device=rank.device),
    )
    torch.distributed.all_reduce(tokens, op=torch.distributed.ReduceOp.MAX)
    return bool(tokens)


def _skip(skipped: Skipped, optim: Optim, name: str, what: str) -> None:
    """Count a mini-batch without finite gradients; every rank counts the same mini-batches.

    `name` is the settings key that `optim` was read from; `what` names the mini-batch and its
    gradient norm. Raises UpdateError unless the mini-batch may be skipped.
    """
    skipped.in_a_row += 1
    if optim.skip_nonfinite:
        if skipped.in_a_row <= MOST_SKIPPED:
            logger.warning("%s; the mini-batch is skipped (counted as update/skipped)", what)
            return
        reason = f"the last {skipped.in_a_row} mini-batches had no finite gradients"
    else:
        reason = f"{name}.skip_nonfinite=False does not allow skipping it"
    raise UpdateError(
        f"{what}, expected a finite number; {reason}, so the step was not stored. Check the "
        "rewards and log-probs of this step, and start a new run with a smaller learning rate"
    )


def gradients(
    rank: Rank,
    data: StepData,
    mini_batch: MiniBatch,
    compared: Compared,
    routes: Mapping[str, Routes] | None,
    tallies: list[Tally] | None = None,
) -> tuple[list[Report], Counts]:
    """Run the forward and backward passes for a mini-batch; leave gradients in the model's buffers.

    In bypass_mode, tokens are rejected after their forward pass. If the number of rejected tokens
    is needed earlier, an additional forward pass computes it.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        mini_batch: The mini-batch.
        compared: The inputs of the updates.
        routes: Routes to replay, keyed by sample id; None for native routing.
        tallies: A list to which the statistics of each micro-batch's corrections are appended.

    Returns:
        The reports of the micro-batches, empty except on the last pipeline stage; and the
        replay counts.
    """
    batches = lay_out_share(rank, data, mini_batch, routes)
    own = rank.functions.get(_LOSS)
    objective = objective_of(rank.config, own)
    counted, chosen = _known_before(
        rank, data, mini_batch, compared, batches, routes, objective=objective
    )
    totals, positions = totals_of(rank, data, mini_batch, counted)
    replay = make_replay(rank, batches, routes)

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
    routers = rank.routers if replay.replayers else {}
    with bound(routers, replay.replayers, forward_only=False):
        scale = auxiliary_scale(totals.divisor(objective.mode), positions)
        reports = training_pass(rank.chunks, batches, loss, rank.with_padding_mask, scale)
    return reports, counts_of(replay)


def auxiliary_scale(divisor: int, positions: int) -> float:
    """Return the factor for the routers' auxiliary losses in a mini-batch.

    Megatron multiplies the auxiliary loss of each micro-batch by the micro-batch's number of
    tokens, including prompts but not padding. It divides the sum of these products by the divisor
    of the main loss. With this factor, the mini-batch's auxiliary loss is the mean over its
    micro-batches, weighted by their numbers of tokens, regardless of how the main loss is averaged.

    With a padding mask, Megatron-core 0.16.1 counts the tokens of all ranks that share a
    micro-batch, because reduce_from_tensor_model_parallel_region changes the rank's own counts in
    place. Without a mask it counts only the rank's own tokens. Models with auxiliary losses always
    receive a mask (see Rank.with_padding_mask).

    Args:
        divisor: The divisor of the mini-batch's loss: a number of tokens or samples.
        positions: The number of positions in the mini-batch's samples, including prompts.
    """
    return divisor / positions


def _known_before(
    rank: Rank,
    data: StepData,
    mini_batch: MiniBatch,
    compared: Compared,
    batches: Sequence[MicroBatch],
    routes: Mapping[str, Routes] | None,
    *,
    objective: Objective,
) -> tuple[Compared, BySample | None]:
    """Find the tokens that a mini-batch's loss includes, and the tokens that it chooses.

    All ranks must call this collective. Either result may require an additional forward pass. The
    tokens that bypass_mode will reject are found here only if gradients depend on their number.

    Returns:
        `compared` without the rejected tokens; and, keyed by sample id, whether each token is
        chosen. The second result is None if the loss does not choose tokens or if this is not the
        last stage.
    """
    correction = rank.config.algorithm.rollout_correction
    choose = loss_of(rank.config, rank.functions.get(_LOSS)).choose
    rejects = correction.bypass_mode and correction.rejects
    counts = objective.has_other_divisor or rank.with_auxiliary_loss
    if choose is None and not (rejects and counts):
        return compared, None
    current = logprobs_of(rank, batches, routes)
    if not rank.position.last_stage:
        return compared, None
    if rejects:
        compared = without_rejected(rank, data, current, compared)
    if choose is None:
        return compared, None
    return compared, chosen_tokens(rank, data, mini_batch, compared, choose, current)


def _targets(
    rank: Rank,
    response: ResponseTokens,
    compared: Compared,
    chosen: BySample | None,
    device: torch.device,
) -> Targets:
    def joined(values: Mapping[str, npt.NDArray[Any]], dtype: type = np.float32) -> torch.Tensor:
        return uploaded(response.joined(values, dtype), device)

    mask_T = joined(compared.mask, np.bool_)
    reference, weights = compared.reference, compared.weights
    return Targets(
        mask_T=mask_T,
        advantages_T=joined(compared.advantages),
        old_T=joined(compared.old),
        reference_T=None if reference is None else joined(reference),
        weights_T=None if weights is None else joined(weights),
        samples=SamplesOfBatch(rank, response, mask_T),
        chosen_T=None if chosen is None else joined(chosen, np.bool_),
    )


def _sums(reports: Sequence[Report]) -> dict[str, float]:
    """Add up, for each name, the numbers that the micro-batches of a mini-batch report."""
    # One copy from the device; the sum is the same as that of the single numbers.
    named = [(name, value) for report in reports for name, value in report.items()]
    values = torch.stack([value.double() for _, value in named]).tolist() if named else []
    sums: dict[str, float] = {}
    for (name, _), value in zip(named, values, strict=True):
        sums[name] = sums.get(name, 0.0) + value
    return sums
