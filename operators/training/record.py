"""R2: from what the routers chose in a pass to the routes of each sample.

Under sequence parallelism each rank's routers see a part of the sequence, so the choice is gathered
inside the tensor-parallel group, and nowhere else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from operators.training.batch import MicroBatch, take_up
from operators.training.logprobs import Group
from operators.training.replay import Recorder
from pipeline.traces.records import Geometry, Routes, Sample


def make_recorders(geometry: Geometry, micro_batches: int) -> dict[int, Recorder]:
    """One recorder for each layer of this rank."""
    # torch has no complete uint16; ids below 32,768 fit into int16.
    dtype = torch.uint8 if geometry.dtype is np.uint8 else torch.int16
    return {layer: Recorder(layer, micro_batches, dtype) for layer in geometry.layers}


def recorded_routes(
    recorders: Mapping[int, Recorder],
    geometry: Geometry,
    batches: Sequence[MicroBatch],
    samples: Mapping[str, Sample],
    sequence_group: Group | None,
) -> dict[str, Routes]:
    """The routes of the samples of a pass, all rows valid, of this rank's layers (none: {}).

    `sequence_group` holds the ranks among which the sequence is cut, in order; None: it is whole.
    """
    routes: dict[str, Routes] = {}
    if not geometry.layers:
        return routes
    for index, batch in enumerate(batches):
        sets_LRK = torch.stack([recorders[layer].sets_RK[index] for layer in geometry.layers])
        B, N = batch.tokens_BN.shape
        sets = _gathered(sets_LRK, sequence_group).astype(geometry.dtype)
        sets_NBLK = sets.reshape(len(geometry.layers), N, B, geometry.topk).transpose(1, 2, 0, 3)
        routes.update(take_up(batch.ids, samples, sets_NBLK))
    return routes


def _gathered(sets_LRK: torch.Tensor, group: Group | None) -> npt.NDArray[Any]:
    if group is None:
        return sets_LRK.cpu().numpy()
    # As bytes: not every backend moves 16-bit integers.
    mine = sets_LRK.contiguous().view(torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, mine, group=group)
    return torch.cat([part.view(sets_LRK.dtype) for part in parts], dim=1).cpu().numpy()
