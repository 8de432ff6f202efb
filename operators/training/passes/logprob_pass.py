"""Forward passes that compute log-probs for a step's samples, in the mini-batches of epoch 0.

Each kind of pass has its own settings, which determine its micro-batches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from operators.training.batches.micro_batch import MicroBatch, ResponseTokens
from operators.training.batches.step_data import StepData
from operators.training.megatron.schedules import Chunk
from operators.training.passes.share import (
    lay_out_share,
    make_replay,
    response_logprobs,
    token_values,
)
from operators.training.rank import Rank
from operators.training.replay.counts import (
    Counts,
    SampleCounts,
    added,
    counts_of,
    sample_counts_of,
)
from operators.training.replay.hooks import Recorder, Replayer
from operators.training.replay.recording import RouteGroups, make_recorders, recorded_routes
from pipeline import progress
from pipeline.traces.format.types import Routes

LogProbs = dict[str, npt.NDArray[np.float32]]
"""Log-probs of the response tokens, [G] each, keyed by sample id."""


@dataclass
class LogProbPass:
    """The results of a log-prob pass for this rank's samples."""

    logprobs: LogProbs = field(default_factory=dict)
    """Log-probs; empty except on the last pipeline stage."""
    routes: dict[str, Routes] = field(default_factory=dict)
    """Routes of this rank's layers, keyed by sample id; empty unless the pass records."""
    counts: Counts = field(default_factory=dict)
    """Replay counts, keyed by layer."""
    samples: SampleCounts = field(default_factory=dict)
    """Replay counts, keyed by sample id."""


def native_pass(rank: Rank, data: StepData, chunks: Sequence[Chunk]) -> LogProbPass:
    """Compute log-probs with native routing.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        chunks: The chunks of the trained model or of the reference.
    """
    found = LogProbPass()
    layout = data.layouts["reference" if chunks is rank.reference else "log_prob"]
    for mini_batch in progress.counted(layout.epoch(0)):
        batches = lay_out_share(rank, data, mini_batch, None)
        found.logprobs |= _forward(rank, chunks, batches, {})
    return found


def recording_pass(rank: Rank, data: StepData) -> LogProbPass:
    """Compute log-probs of the trained model with native routing, and record the routes (R2)."""
    found = LogProbPass()
    for mini_batch in progress.counted(data.layouts["log_prob"].epoch(0)):
        batches = lay_out_share(rank, data, mini_batch, None)
        if rank.geometry is None:
            raise ValueError("a dense model has no routes to record")
        recorders = make_recorders(rank.geometry, len(batches))
        found.logprobs |= _forward(rank, rank.chunks, batches, recorders)
        found.routes |= recorded_routes(recorders, rank.geometry, batches, _route_groups(rank))
    return found


def _route_groups(rank: Rank) -> RouteGroups:
    position = rank.position
    return RouteGroups(
        sequence=position.tensor_group if position.sequence.count > 1 else None,
        context=position.context_group if position.context.count > 1 else None,
    )


def replaying_pass(rank: Rank, data: StepData, routes: Mapping[str, Routes]) -> LogProbPass:
    """Compute log-probs of the trained model with recorded routes.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        routes: Routes to replay, keyed by sample id.

    Raises:
        ReplayError: The pass did not use its routes exactly once.
    """
    found = LogProbPass()
    for mini_batch in progress.counted(data.layouts["log_prob"].epoch(0)):
        batches = lay_out_share(rank, data, mini_batch, routes)
        replay = make_replay(rank, batches, routes)
        found.logprobs |= _forward(rank, rank.chunks, batches, replay.replayers)
        found.counts = added([found.counts, counts_of(replay)])
        found.samples |= sample_counts_of(replay, batches)
    return found


def logprobs_of(
    rank: Rank, batches: Sequence[MicroBatch], routes: Mapping[str, Routes] | None
) -> LogProbs:
    """Compute log-probs of the trained model for the given micro-batches.

    Args:
        rank: This training rank.
        batches: The micro-batches, laid out with `routes`.
        routes: Routes to replay, keyed by sample id; None for native routing.

    Returns:
        float32 [G] each, keyed by sample id, on the last pipeline stage; an empty dict elsewhere.
    """
    return _forward(rank, rank.chunks, batches, make_replay(rank, batches, routes).replayers)


def _forward(
    rank: Rank,
    chunks: Sequence[Chunk],
    batches: Sequence[MicroBatch],
    objects: Mapping[int, Recorder | Replayer],
) -> LogProbs:
    def logprobs(response: ResponseTokens, hidden_BMH: torch.Tensor) -> torch.Tensor:
        return response_logprobs(rank, chunks, response, hidden_BMH)[0]

    return token_values(rank, (chunks, rank.routers), batches, objects, logprobs)
