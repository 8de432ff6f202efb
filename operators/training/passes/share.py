"""A rank's micro-batches of a mini-batch, laid out on first access; log-probs of their tokens."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

import numpy.typing as npt
import torch
import torch.distributed as dist

from operators.training.batches.layout import MiniBatch
from operators.training.batches.micro_batch import Contents, MicroBatch, ResponseTokens, lay_out
from operators.training.batches.step_data import StepData, without_loss
from operators.training.megatron.head import output_weight
from operators.training.megatron.schedules import Chunk
from operators.training.passes.logprobs import logprobs_and_entropy
from operators.training.rank import Rank
from operators.training.replay.hooks import Replayer
from pipeline.model.geometry import Geometry
from pipeline.traces.format.types import Routes


def lay_out_share(
    rank: Rank, data: StepData, mini_batch: MiniBatch, routes: Mapping[str, Routes] | None
) -> "Share[MicroBatch]":
    """This rank's micro-batches of a mini-batch, with the routes to replay, if any.

    A pipeline stage without MoE layers has no routes to replay.
    """
    if rank.geometry is not None and not rank.geometry.layers:
        routes = None

    contents = Contents(
        samples=data.samples,
        untrained=data.untrained,
        without_loss=without_loss(rank.config),
        routes=routes,
        geometry=None if routes is None else rank.geometry,
        sequence=rank.position.sequence,
        context=rank.position.context,
    )
    micro_batches = mini_batch.shares[rank.position.dp_rank]
    return Share(
        len(micro_batches), lambda index: lay_out(micro_batches[index], data.ids, contents)
    )


T = TypeVar("T")


class Share(Sequence[T]):
    """A sequence whose items are made on first access and kept, such as micro-batches.

    So the routes of the next micro-batch may still be arriving while this one is computed.
    """

    def __init__(self, count: int, made: Callable[[int], T]) -> None:
        self._count = count
        self._made = made
        self._kept: dict[int, T] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        index = range(self._count)[index]
        if index not in self._kept:
            self._kept[index] = self._made(index)
        return self._kept[index]


def make_replayers(geometry: Geometry, batches: Sequence[MicroBatch]) -> dict[int, Replayer]:
    """Make a replayer for each layer of this rank, from micro-batches laid out with routes."""
    kinds_R = Share(len(batches), lambda batch: batches[batch].rows.kinds_R)

    def sets_of(column: int) -> Share[npt.NDArray[Any]]:
        return Share(len(batches), lambda batch: _sets_LRK(batches[batch])[column])

    return {
        layer: Replayer(layer, geometry.experts, kinds_R, sets_of(column))
        for column, layer in enumerate(geometry.layers)
    }


def _sets_LRK(batch: MicroBatch) -> npt.NDArray[Any]:
    if batch.rows.sets_LRK is None:
        raise ValueError(f"micro-batch of {batch.response.ids}: it was laid out without routes")
    return batch.rows.sets_LRK


def response_logprobs(
    rank: Rank,
    chunks: Sequence[Chunk],
    response: ResponseTokens,
    hidden_BMH: torch.Tensor,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropy of this rank's response tokens, float32 [T], on the last stage.

    `chunks` are those of the trained model or of the reference, `hidden_BMH` what they returned.
    """
    weight_VH = output_weight(chunks)
    if weight_VH is None:
        raise ValueError("this pipeline stage has no output layer")
    places_T = torch.from_numpy(response.places_T).to(hidden_BMH.device)
    return logprobs_and_entropy(
        hidden_BMH.flatten(0, 1).index_select(0, places_T),
        weight_VH,
        torch.from_numpy(response.labels_T).to(hidden_BMH.device),
        rank.config.actor_rollout_ref.rollout.temperature,
        rank.position.tensor_group,
        entropy_gradient,
    )


def of_all_ranks(rank: Rank, response: ResponseTokens, values_T: torch.Tensor) -> torch.Tensor:
    """Values of all response tokens of a micro-batch, [U], from each context-parallel rank's [T].

    Another micro-batch may cut the samples elsewhere. The ranks of the context-parallel group call.
    """
    if rank.position.context.count == 1:
        return values_T
    values_U = values_T.new_zeros(sum(response.lengths))
    values_U[torch.from_numpy(response.own_T).to(values_T.device)] = values_T
    dist.all_reduce(values_U, group=rank.position.context_group)
    return values_U
