"""Recording (R2): the routers' choices in a pass become the routes of each sample.

Under sequence parallelism each rank's routers see a part of the sequence, so the choices are
gathered within the tensor-parallel group, and nowhere else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
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


def recorded_routes(
    recorders: Mapping[int, Recorder],
    geometry: Geometry,
    batches: Sequence[MicroBatch],
    sequence_group: ProcessGroup | None,
) -> dict[str, Routes]:
    """The routes of a pass's samples in this rank's layers, all rows valid; {} without layers.

    `sequence_group` holds the ranks that share the sequence, in order; None: it is not split.
    """
    routes: dict[str, Routes] = {}
    if not geometry.layers:
        return routes
    for index, batch in enumerate(batches):
        sets_LRK = torch.stack([recorders[layer].sets_RK[index] for layer in geometry.layers])
        B, N = batch.tokens_BN.shape
        sets = _gathered(sets_LRK, sequence_group).astype(geometry.dtype)
        sets_BNLK = sets.reshape(len(geometry.layers), N, B, geometry.topk).transpose(2, 1, 0, 3)
        routes.update(take_up(batch.places, sets_BNLK))
    return routes


def _gathered(sets_LRK: torch.Tensor, group: ProcessGroup | None) -> npt.NDArray[Any]:
    if group is None:
        return sets_LRK.cpu().numpy()
    # Sent as bytes, because not every backend supports 16-bit integers.
    mine = sets_LRK.contiguous().view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat([part.view(sets_LRK.dtype) for part in parts], dim=1).cpu().numpy()
