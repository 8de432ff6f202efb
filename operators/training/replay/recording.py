"""Recording (R2): the routers' choices in a pass become the routes of each sample.

Under sequence and context parallelism, each rank's routers see only part of each sequence. The
choices are therefore gathered within the tensor-parallel group, then within the context-parallel
group.

Dimensions: B rows in a micro-batch, M positions in a row on this rank, L MoE layers on this rank, R
rows that this rank's routers see, K experts per token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from operators.training.batches.micro_batch import MicroBatch, take_up
from operators.training.replay.hooks import Recorder
from pipeline.model.geometry import Geometry
from pipeline.traces.format.types import Routes


def make_recorders(geometry: Geometry, micro_batches: int) -> dict[int, Recorder]:
    """Create a recorder for each MoE layer of this rank."""
    # torch lacks operations for uint16, so int16 is used, which holds ids below 32,768.
    dtype = torch.uint8 if geometry.dtype is np.uint8 else torch.int16
    return {layer: Recorder(layer, micro_batches, dtype) for layer in geometry.layers}


@dataclass(frozen=True)
class RouteGroups:
    """The groups of ranks among which sequences are split, in rank order.

    A field is None if sequences are not split in the corresponding way.
    """

    sequence: ProcessGroup | None
    context: ProcessGroup | None


def recorded_routes(
    recorders: Mapping[int, Recorder],
    geometry: Geometry,
    batches: Sequence[MicroBatch],
    groups: RouteGroups,
) -> dict[str, Routes]:
    """Return the routes of a pass's samples. The ranks of `groups` must call this together.

    Args:
        recorders: The pass's recorders, keyed by layer.
        geometry: Geometry of this rank's MoE layers.
        batches: The pass's micro-batches.
        groups: The ranks that share the sequences.

    Returns:
        Routes of this rank's layers, keyed by sample id, with all rows valid; empty if this rank
        has no MoE layers.
    """
    routes: dict[str, Routes] = {}
    if not geometry.layers:
        return routes
    for index, batch in enumerate(batches):
        sets_LRK = torch.stack([recorders[layer].sets_RK[index] for layer in geometry.layers])
        B, M = batch.tokens_BM.shape
        # Join the slices of sequence parallelism first, then the parts of the zigzag.
        sets_LRK = torch.cat(_gathered(sets_LRK, groups.sequence), dim=1)
        parts = [
            part.cpu()
            .numpy()
            .astype(geometry.dtype)
            .reshape(len(geometry.layers), M, B, geometry.topk)
            .transpose(2, 1, 0, 3)
            for part in _gathered(sets_LRK, groups.context)
        ]
        routes.update(take_up(batch.places, batch.context.joined(parts, batch.ends)))
    return routes


def _gathered(sets_LRK: torch.Tensor, group: ProcessGroup | None) -> list[torch.Tensor]:
    if group is None:
        return [sets_LRK]
    # Send bytes, because not every backend supports 16-bit integers.
    mine = sets_LRK.contiguous().view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [part.view(sets_LRK.dtype) for part in parts]
