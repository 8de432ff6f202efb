"""Recording (R2): the routers' choices in a pass become the routes of each sample.

Under sequence and context parallelism each rank's routers see a part of the sequences, so the
choices are gathered within the tensor-parallel group, then within the context-parallel group.
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
    """Make a recorder for each layer of this rank."""
    # torch's uint16 lacks operations; ids below 32,768 fit into int16.
    dtype = torch.uint8 if geometry.dtype is np.uint8 else torch.int16
    return {layer: Recorder(layer, micro_batches, dtype) for layer in geometry.layers}


@dataclass(frozen=True)
class RouteGroups:
    """The ranks that share the sequences, each in order; None: they are not split."""

    sequence: ProcessGroup | None
    context: ProcessGroup | None


def recorded_routes(
    recorders: Mapping[int, Recorder],
    geometry: Geometry,
    batches: Sequence[MicroBatch],
    groups: RouteGroups,
) -> dict[str, Routes]:
    """The routes of a pass's samples in this rank's layers, all rows valid; {} without layers."""
    routes: dict[str, Routes] = {}
    if not geometry.layers:
        return routes
    for index, batch in enumerate(batches):
        sets_LRK = torch.stack([recorders[layer].sets_RK[index] for layer in geometry.layers])
        B, M = batch.tokens_BM.shape
        # Contiguous rows of the whole sequence come first, then the parts of the zigzag.
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
    # Sent as bytes, because not every backend supports 16-bit integers.
    mine = sets_LRK.contiguous().view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return [part.view(sets_LRK.dtype) for part in parts]
