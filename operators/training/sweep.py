"""One forward pass over a step's samples, in the mini-batches of epoch 0: log-probs per token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from operators.training.batch import MicroBatch, pick
from operators.training.counts import Counts, added, counts_of
from operators.training.data import StepData
from operators.training.logprobs import logprobs_and_entropy
from operators.training.passes import Chunk, forward_pass
from operators.training.rank import Rank, lay_out_share, make_replayers
from operators.training.record import make_recorders, recorded_routes
from operators.training.replay import Recorder, Replayer, bound
from pipeline.traces.records import Routes

LogProbs = dict[str, npt.NDArray[np.float32]]
"""By sample id: of each response token, [G]."""


@dataclass
class Swept:
    """What a sweep found of this rank's samples."""

    logprobs: LogProbs = field(default_factory=dict)
    """Empty except on the last pipeline stage."""
    routes: dict[str, Routes] = field(default_factory=dict)
    """What was recorded, of this rank's layers."""
    counts: Counts = field(default_factory=dict)
    """What was replayed."""


def native_sweep(rank: Rank, data: StepData, chunks: Sequence[Chunk]) -> Swept:
    """Log-probs with native routing, of the trained model or the reference."""
    swept = Swept()
    for mini_batch in data.layout.epoch(0):
        batches = lay_out_share(rank, data, mini_batch, None)
        _forward(rank, data, chunks, batches, {}, swept)
    return swept


def recording_sweep(rank: Rank, data: StepData) -> Swept:
    """Log-probs of the trained model with native routing, and what its routers chose (R2)."""
    swept = Swept()
    for mini_batch in data.layout.epoch(0):
        batches = lay_out_share(rank, data, mini_batch, None)
        if rank.geometry is None:
            raise ValueError("a dense model has no routes to record")
        recorders = make_recorders(rank.geometry, len(batches))
        _forward(rank, data, rank.chunks, batches, recorders, swept)
        group = rank.place.tensor_group if rank.place.sequence.count > 1 else None
        swept.routes |= recorded_routes(recorders, rank.geometry, batches, data.samples, group)
    return swept


def replaying_sweep(rank: Rank, data: StepData, routes: Mapping[str, Routes]) -> Swept:
    """Log-probs of the trained model with recorded routing."""
    swept = Swept()
    for mini_batch in data.layout.epoch(0):
        batches = lay_out_share(rank, data, mini_batch, routes)
        if rank.geometry is None:
            raise ValueError("a dense model cannot replay routes")
        replayers = make_replayers(rank.geometry, batches)
        _forward(rank, data, rank.chunks, batches, replayers, swept)
        swept.counts = added([swept.counts, counts_of(replayers)])
    return swept


def _forward(
    rank: Rank,
    data: StepData,
    chunks: Sequence[Chunk],
    batches: Sequence[MicroBatch],
    objects: Mapping[int, Recorder | Replayer],
    swept: Swept,
) -> None:
    temperature = rank.config.actor_rollout_ref.rollout.temperature

    def logprobs(index: int, logits_BNV: torch.Tensor) -> npt.NDArray[np.float32]:
        labels_BN = torch.from_numpy(batches[index].labels_BN).to(logits_BNV.device)
        logprobs_BN, _ = logprobs_and_entropy(
            logits_BNV, labels_BN, temperature, rank.place.tensor_group
        )
        return logprobs_BN.cpu().numpy()

    with bound(rank.routers if objects else {}, objects, forward_only=True):
        results = forward_pass(chunks, batches, logprobs, rank.with_padding_mask)
    for batch, logprobs_BN in zip(batches, results, strict=bool(results)):
        swept.logprobs |= pick(batch.ids, data.samples, logprobs_BN)
