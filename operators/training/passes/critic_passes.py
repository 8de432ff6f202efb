"""The critic's passes over a step's samples: values of the response tokens, and updates.

The value of a token is computed at the position that predicts the token. It is the value of
the text before that token.

Dimensions: B rows in a micro-batch, M positions that this rank holds, T response tokens that these
positions predict, U response tokens on all context-parallel ranks, G response tokens in a sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from operators.training.batches.layout import MiniBatch
from operators.training.batches.micro_batch import ResponseTokens
from operators.training.batches.step_data import StepData
from operators.training.batches.upload import uploaded
from operators.training.megatron.schedules import training_pass
from operators.training.passes.compared import Compared
from operators.training.passes.flat import BySample
from operators.training.passes.objective import Report
from operators.training.passes.samples import SamplesOfBatch
from operators.training.passes.share import lay_out_share, make_replay, token_values
from operators.training.passes.totals import totals_of
from operators.training.passes.update import SteppedModel, Updates, auxiliary_scale, optimizer_steps
from operators.training.rank import Rank, TrainedCritic
from operators.training.replay.counts import Counts, added, counts_of
from operators.training.replay.hooks import bound
from pipeline import progress
from pipeline.rl.losses.aggregate import aggregation
from pipeline.rl.losses.formulas import value_loss
from pipeline.rl.losses.types import Samples
from pipeline.traces.format.types import Routes

RoutesBySample = Mapping[str, Routes]


@dataclass
class ValuePass:
    """The values of this rank's samples, and the replay counts."""

    values: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    """The values of each sample's response tokens, [G], keyed by sample id; empty unless this rank
    is on the last pipeline stage."""
    counts: Counts = field(default_factory=dict)
    """Replay counts, keyed by layer."""


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a micro-batch over which the loss is aggregated."""

    mask_T: torch.Tensor
    samples: Samples


def values_pass(
    rank: Rank, critic: TrainedCritic, data: StepData, routes: RoutesBySample | None
) -> ValuePass:
    """Compute the values of a step's response tokens.

    Args:
        rank: This training rank.
        critic: The critic on this rank.
        data: This rank's data for the step.
        routes: Routes to replay, keyed by sample id; None for native routing.
    """
    found, model = ValuePass(), (critic.model.chunks, critic.routers)
    for mini_batch in progress.counted(data.layouts["values"].epoch(0)):
        batches = lay_out_share(rank, data, mini_batch, routes)
        replay = make_replay(rank, batches, routes)
        found.values |= token_values(rank, model, batches, replay.replayers, _of_response)
        found.counts = added([found.counts, counts_of(replay)])
    return found


def _of_response(response: ResponseTokens, values_BM1: torch.Tensor) -> torch.Tensor:
    """Return the values of this rank's response tokens, float32 [T]."""
    places_T = uploaded(response.places_T, values_BM1.device)
    return values_BM1.flatten().index_select(0, places_T).float()


def update_critic(
    rank: Rank,
    critic: TrainedCritic,
    data: StepData,
    compared: Compared,
    routes: RoutesBySample | None,
) -> Updates:
    """Train the critic on a step's samples, in the same way as `update` trains the policy.

    Args:
        rank: This training rank.
        critic: The critic on this rank.
        data: This rank's data for the step.
        compared: Values at the start of the step, returns, and the loss mask.
        routes: Routes to replay in each pass, keyed by sample id; None for native routing.

    Raises:
        UpdateError: Gradients are not finite, and the settings forbid skipping the mini-batch.
        ReplayError: A pass did not use its routes exactly once.
    """
    updates = Updates(lr=critic.rates.set(data.step))
    mini_batches = data.layouts["critic_update"].mini_batches
    progress.say(f"step {data.step}: updates of the critic", len(mini_batches), "mini-batches")
    place = f"step {data.step}, mini-batch {{}} of the critic"
    optimizer_steps(
        rank,
        mini_batches,
        lambda batch: critic_gradients(rank, critic, data, batch, compared, routes),
        SteppedModel(
            critic.model.optimizer, critic.skipped, critic.settings.optim, "critic.optim", place
        ),
        updates,
    )
    return updates


def critic_gradients(
    rank: Rank,
    critic: TrainedCritic,
    data: StepData,
    mini_batch: MiniBatch,
    compared: Compared,
    routes: RoutesBySample | None,
) -> tuple[list[Report], Counts]:
    """Run forward and backward passes for a mini-batch; leave gradients in the critic's buffers.

    Args:
        rank: This training rank.
        critic: The critic on this rank.
        data: This rank's data for the step.
        mini_batch: The mini-batch.
        compared: Values at the start of the step, returns, and the loss mask.
        routes: Routes to replay, keyed by sample id; None for native routing.

    Returns:
        The reports of the micro-batches, empty except on the last pipeline stage; and the
        replay counts.
    """
    batches = lay_out_share(rank, data, mini_batch, routes)
    replay = make_replay(rank, batches, routes)

    totals, positions = totals_of(rank, data, mini_batch, compared)

    def loss(index: int, values_BM1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Report]:
        return _loss_and_report(rank, batches[index].response, compared, values_BM1)

    critic.model.optimizer.zero_grad()
    routers = critic.routers if replay.replayers else {}
    with bound(routers, replay.replayers, forward_only=False):
        scale = auxiliary_scale(totals.divisor(critic.settings.loss_agg_mode), positions)
        reports = training_pass(critic.model.chunks, batches, loss, rank.with_padding_mask, scale)
    return reports, counts_of(replay)


def _loss_and_report(
    rank: Rank, response: ResponseTokens, compared: Compared, values_BM1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, Report]:
    """Return the weighted loss (summed over tokens), its divisor (int32) and a report."""
    assert rank.critic is not None
    settings, own = rank.critic.settings, rank.config.critic

    def joined(values: BySample | None, dtype: type = np.float32) -> torch.Tensor:
        assert values is not None, "values or returns are missing, although GAE computes both"
        return uploaded(response.joined(values, dtype), values_BM1.device)

    mask_T = joined(compared.mask, np.bool_)
    values_T = _of_response(response, values_BM1)
    found = value_loss(
        values_T, joined(compared.values), joined(compared.returns), own.cliprange_value
    )
    tokens = _Tokens(mask_T, SamplesOfBatch(rank, response, mask_T))
    factor = settings.loss_scale_factor or rank.config.data.max_response_length
    aggregated = aggregation(settings.loss_agg_mode, tokens, factor)

    def total(numbers_T: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_T, numbers_T, 0).sum()

    loss = total(found.loss_T * aggregated.weights_T)
    report = {
        "tokens": mask_T.sum(),
        "divisor": aggregated.divisor,
        "vf_loss": loss,
        "vf_clipped": total(found.clipped_T),
        "vpred": total(values_T),
    }
    return loss, aggregated.divisor, {name: x.detach() for name, x in report.items()}
