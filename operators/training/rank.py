"""What a training rank holds for the whole run, and how it lays out its share of a mini-batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from megatron.core import parallel_state

from operators.training.batch import MicroBatch, Slice, lay_out
from operators.training.data import StepData, records, replays_recorded
from operators.training.layout import MiniBatch
from operators.training.logprobs import Group
from operators.training.model import TrainedModel, build_model, routers
from operators.training.parallel import Ranks
from operators.training.passes import Chunk
from operators.training.refuse import has_auxiliary_loss, refuse_without_effect
from operators.training.replay import Replayer, ReplayError, Router
from pipeline.config.tree import RunConfig
from pipeline.traces.records import Geometry, Routes


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the parallel layout."""

    dp_rank: int
    data_parallel: int
    stage: int
    """Pipeline stage."""
    last_stage: bool
    """Logits, losses and log-probs exist on the last stage only."""
    tensor_rank: int
    tensor_group: Group
    sequence: Slice
    """The part of the sequence that this rank's routers see."""

    @property
    def speaks_for_rows(self) -> bool:
        """Whether this rank's router rows are nobody else's too (for counting)."""
        return self.sequence.count > 1 or self.tensor_rank == 0

    @property
    def speaks_for_tokens(self) -> bool:
        """Whether this rank reports the results per token of its data-parallel share."""
        return self.last_stage and self.tensor_rank == 0


@dataclass(frozen=True)
class Rank:
    """One training rank."""

    config: RunConfig
    place: Place
    chunks: Sequence[Chunk]
    """Of the trained model: one, or one per virtual pipeline stage."""
    optimizer: Any
    """Megatron's."""
    reference: Sequence[Chunk] | None
    """The reference policy, to which no routes are ever bound; None: no KL loss."""
    routers: Mapping[int, Router]
    """The trained model's MoE routers on this rank, by model index of their layer."""
    geometry: Geometry | None
    """Of this rank's MoE layers; None: a dense model."""
    with_padding_mask: bool
    """Whether expert bias or an auxiliary loss must not see padding."""


def make_rank(config: RunConfig, ranks: Ranks, folder: Path) -> tuple[Rank, TrainedModel]:
    """Build the policy (and the reference, if the loss needs it) from a folder of HF weights.

    Raises InputError for what cannot be trained or replayed, ReplayError when replay is on and
    the model has no MoE layers.
    """
    actor = config.actor_rollout_ref.actor
    model = build_model(folder, actor)
    refuse_without_effect(model.config, actor.router_replay)
    reference = build_model(folder, actor, training=False) if actor.use_kl_loss else None
    of_rank = routers(model)
    geometry = None
    if model.config.num_moe_experts:
        geometry = Geometry(
            model.config.num_moe_experts, model.config.moe_router_topk, tuple(sorted(of_rank))
        )
    elif replays_recorded(config) or records(config):
        raise ReplayError(
            f"actor.router_replay.mode is {actor.router_replay.mode}, but the model has no MoE "
            "layers: set it to disabled"
        )
    rank = Rank(
        config=config,
        place=place_of(ranks, actor.megatron.sequence_parallel),
        chunks=model.chunks,
        optimizer=model.optimizer,
        reference=None if reference is None else reference.chunks,
        routers=of_rank,
        geometry=geometry,
        with_padding_mask=padding_mask_needed(model.config),
    )
    return rank, model


def place_of(ranks: Ranks, sequence_parallel: bool) -> Place:
    """This rank's place in Megatron's groups, which exist."""
    cut = sequence_parallel and ranks.tp_size > 1
    return Place(
        dp_rank=ranks.dp_rank,
        data_parallel=ranks.dp_size,
        stage=ranks.pp_rank,
        last_stage=ranks.is_last_stage,
        tensor_rank=ranks.tp_rank,
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        sequence=Slice(ranks.tp_rank, ranks.tp_size) if cut else Slice(),
    )


def padding_mask_needed(config: Any) -> bool:
    """Whether Megatron's TransformerConfig has anything that counts tokens per expert."""
    return bool(
        config.moe_router_enable_expert_bias
        or config.moe_z_loss_coeff
        or has_auxiliary_loss(config)
    )


def lay_out_share(
    rank: Rank, data: StepData, mini_batch: MiniBatch, routes: Mapping[str, Routes] | None
) -> "Share[MicroBatch]":
    """This rank's micro-batches of a mini-batch, with the routes to replay if there are any.

    A pipeline stage without MoE layers has routes of no sample, and none to replay.
    """
    if rank.geometry is not None and not rank.geometry.layers:
        routes = None

    micro_batches = data.micro_batches(mini_batch, rank.place.dp_rank)

    def made(index: int) -> MicroBatch:
        return lay_out(
            micro_batches[index],
            mini_batch.length,
            data.samples,
            data.advantages,
            routes,
            None if routes is None else rank.geometry,
            rank.place.sequence,
        )

    return Share(len(micro_batches), made)


T = TypeVar("T")


class Share(Sequence[T]):
    """What is made when it is first asked for, and kept: micro-batches, laid out.

    So the routes of the next one may still be on their way while this one is computed.
    """

    def __init__(self, count: int, made: Callable[[int], T]) -> None:
        self._count = count
        self._made = made
        self._kept: dict[int, T] = {}

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        index = range(self._count)[index]
        if index not in self._kept:
            self._kept[index] = self._made(index)
        return self._kept[index]


def make_replayers(geometry: Geometry, batches: Sequence[MicroBatch]) -> dict[int, Replayer]:
    """One replayer for each layer of this rank, from micro-batches laid out with routes."""
    kinds_R = Share(len(batches), lambda batch: batches[batch].rows.kinds_R)

    def sets_of(column: int) -> Share[Any]:
        return Share(len(batches), lambda batch: batches[batch].rows.sets_LRK[column])

    return {
        layer: Replayer(layer, geometry.experts, kinds_R, sets_of(column))
        for column, layer in enumerate(geometry.layers)
    }
