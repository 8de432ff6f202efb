"""A rank's micro-batches in a mini-batch, laid out on first access, and their tokens' log-probs."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar, overload

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from operators.training.agree import await_ranks
from operators.training.batches.layout import MiniBatch
from operators.training.batches.micro_batch import Contents, MicroBatch, ResponseTokens, lay_out
from operators.training.batches.step_data import StepData, without_loss
from operators.training.batches.upload import uploaded
from operators.training.megatron.head import output_weight
from operators.training.megatron.schedules import Chunk, forward_pass
from operators.training.passes.logprobs import logprobs_and_entropy
from operators.training.rank import Rank
from operators.training.replay.counts import Replay
from operators.training.replay.hooks import Recorder, Replayer, Router, bound
from operators.training.replay.replayed import ReplayedRows
from pipeline.traces.format.types import Routes


def lay_out_share(
    rank: Rank, data: StepData, mini_batch: MiniBatch, routes: Mapping[str, Routes] | None
) -> "Share[MicroBatch]":
    """Return this rank's micro-batches in a mini-batch, which are laid out on first access.

    All ranks must call this, because it is a collective while routes are still being read.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        mini_batch: The mini-batch.
        routes: Routes to replay, keyed by sample id; None if nothing is replayed. A pipeline stage
            without MoE layers ignores the routes.
    """
    if routes is not None and routes is data.routes:
        _await_routes(rank, data, mini_batch)
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
        len(micro_batches),
        lambda index: lay_out(micro_batches[index], data.ids, contents),
        ahead=True,
    )


def _await_routes(rank: Rank, data: StepData, mini_batch: MiniBatch) -> None:
    """Wait until every rank has its routes for a mini-batch, unless an earlier call already has.

    Without this wait, ranks that have their routes would enter a collective in the pass, and wait
    there for a rank that is still reading. Collectives in passes time out sooner than this wait
    does.
    """
    rows = {row for share in mini_batch.shares for micro in share for row in micro.rows}
    if data.routes is None or rows <= data.read_rows:
        return
    if rank.geometry is not None and rank.geometry.layers:
        data.routes.await_all([data.ids[row] for row in mini_batch.rows(rank.position.dp_rank)])
    await_ranks()
    data.read_rows.update(rows)


T = TypeVar("T")


class Share(Sequence[T]):
    """A sequence whose items, such as micro-batches, are created on first access and kept.

    A pass therefore holds only the items that it has reached and, with `ahead`, the next one, which
    a thread creates while the caller uses the current one. If the thread fails, the caller creates
    the item and gets the error.
    """

    def __init__(self, count: int, made: Callable[[int], T], ahead: bool = False) -> None:
        self._count = count
        self._made = made
        self._kept: dict[int, T] = {}
        self._thread = ThreadPoolExecutor(1, "lay-out") if ahead and count > 1 else None
        self._next: dict[int, Future[T]] = {}

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
            waiting = self._next.pop(index, None)
            made = waiting is not None and waiting.exception() is None
            self._kept[index] = waiting.result() if waiting and made else self._made(index)
            after = index + 1
            if self._thread is not None and after < self._count and after not in self._kept:
                self._next[after] = self._thread.submit(self._made, after)
        return self._kept[index]


def make_replay(
    rank: Rank, batches: Sequence[MicroBatch], routes: Mapping[str, Routes] | None
) -> Replay:
    """Create the replay of a pass; it is empty for a dense model or native routing.

    Args:
        rank: This training rank.
        batches: The micro-batches of the pass, laid out with `routes`.
        routes: Routes to replay, keyed by sample id; None for native routing.
    """
    geometry = rank.geometry
    if geometry is None or routes is None:
        return Replay()
    layers, experts = geometry.layers, geometry.experts

    def rows_of(index: int) -> ReplayedRows:
        rows = batches[index].rows
        if rows.sets_LRK is None:
            ids = batches[index].response.ids
            raise ValueError(f"the micro-batch of {ids} was laid out without routes")
        return ReplayedRows(rows.kinds_R, rows.sets_LRK, layers, experts, rank.device)

    rows = Share(len(batches), rows_of)
    return Replay(rows, {n: Replayer(n, i, experts, rows) for i, n in enumerate(layers)})


def response_logprobs(
    rank: Rank,
    chunks: Sequence[Chunk],
    response: ResponseTokens,
    hidden_BMH: torch.Tensor,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropy for this rank's response tokens, on the last pipeline stage.

    Args:
        rank: This training rank.
        chunks: The chunks of the trained model or of the reference.
        response: The response tokens of the micro-batch.
        hidden_BMH: The final hidden states of the model.
        entropy_gradient: Whether the entropy has a gradient.

    Returns:
        Log-probs and entropy, float32 [T] each.
    """
    weight_VH = output_weight(chunks)
    if weight_VH is None:
        raise ValueError("this pipeline stage has no output layer")
    places_T = uploaded(response.places_T, hidden_BMH.device)
    return logprobs_and_entropy(
        hidden_BMH.flatten(0, 1).index_select(0, places_T),
        weight_VH,
        uploaded(response.labels_T, hidden_BMH.device),
        rank.config.actor_rollout_ref.rollout.temperature,
        rank.position.tensor_group,
        entropy_gradient,
    )


def of_all_ranks(rank: Rank, response: ResponseTokens, values_T: torch.Tensor) -> torch.Tensor:
    """Join the context-parallel ranks' values for all response tokens in a micro-batch.

    The joined values do not depend on how the tokens are divided among context-parallel ranks. This
    matters because the division may differ in another micro-batch that contains the same sample.
    All context-parallel ranks must call this collective.

    Args:
        rank: This training rank.
        response: The response tokens of the micro-batch.
        values_T: Values of this rank's response tokens.

    Returns:
        Values [U] of all response tokens, sample by sample.
    """
    if rank.position.context.count == 1:
        return values_T
    values_U = values_T.new_zeros(sum(response.lengths))
    values_U[uploaded(response.own_T, values_T.device)] = values_T
    dist.all_reduce(values_U, group=rank.position.context_group)
    return values_U


def token_values(
    rank: Rank,
    model: tuple[Sequence[Chunk], Mapping[int, Router]],
    batches: Sequence[MicroBatch],
    objects: Mapping[int, Recorder | Replayer],
    values_of: Callable[[ResponseTokens, torch.Tensor], torch.Tensor],
) -> dict[str, npt.NDArray[np.float32]]:
    """Run a forward pass that computes a number for each response token.

    Args:
        rank: This training rank.
        model: The model's chunks and its MoE routers.
        batches: This rank's micro-batches.
        objects: A recorder or replayer for each router; {} for native routing.
        values_of: Returns the values [T] of this rank's response tokens in a micro-batch, given
            the output of the model.

    Returns:
        float32 [G] each, keyed by sample id, on the last pipeline stage; an empty dict elsewhere.
    """
    chunks, routers = model

    def finish(index: int, output_BMX: torch.Tensor) -> torch.Tensor:
        response = batches[index].response
        return of_all_ranks(rank, response, values_of(response, output_BMX))

    with bound(routers if objects else {}, objects, forward_only=True):
        results = forward_pass(chunks, batches, finish, rank.with_padding_mask)
    if not results:
        return {}
    all_X = torch.cat(results).cpu().numpy()  # the pass's only copy from the device
    ends = np.cumsum([len(values_U) for values_U in results])[:-1]
    found: dict[str, npt.NDArray[np.float32]] = {}
    for batch, values_U in zip(batches, np.split(all_X, ends), strict=True):
        found |= batch.response.split(values_U)
    return found
