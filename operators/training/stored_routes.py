"""Storage of the routes that the log-prob pass recorded (R2), beside the step."""

import logging
from collections.abc import Mapping
from importlib.metadata import version

import numpy as np
import torch.distributed as dist

from operators.training.rank import Rank
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.store import Store
from pipeline.traces import write_training_routes
from pipeline.traces.format.manifest import file_of
from pipeline.traces.format.types import Provenance, Routes, TraceError
from pipeline.traces.read.parts import read_part
from pipeline.traces.read.training import read_training

logger = logging.getLogger(__name__)


def store_routes(
    store: Store,
    rank: Rank,
    step: int,
    routes: Mapping[str, Routes],
    policies: Mapping[int, str] | None,
) -> int:
    """Store the routes of this rank's log-prob pass (R2), or compare them with stored ones.

    `policies` are weights digests by version, of the policy that recorded; None: not known.

    The first rank of each tensor-parallel group does so: its routes are the group's. All ranks
    call. Returns, on all ranks, the number of samples whose stored routes differ from those that
    this trainer replayed (after a restart with kernels that are not deterministic).
    """
    position, geometry = rank.position, rank.geometry
    key = keys.training(step, position.stage, position.dp_rank)
    differ: list[str] = []
    if position.tensor_rank == 0 and geometry is not None and geometry.layers:
        if store.size(key) is None:
            write_training_routes(
                store,
                step,
                position.stage,
                position.dp_rank,
                new_write_id(),
                routes,
                geometry,
                Provenance("R2", step, f"megatron-core {version('megatron-core')}"),
                policies,
            )
        else:
            differ = other_routes(store, step, key, routes, geometry)
    of_ranks: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, differ)
    samples = sorted({id for ids in of_ranks for id in ids})
    if samples and dist.get_rank() == 0:
        logger.warning(
            "step %d: the store has other routes of %d samples, the first is %s, than were "
            "recorded and replayed in training the step again (counted as resume/routes_drift)",
            step,
            len(samples),
            samples[0],
        )
    return len(samples)


def other_routes(
    store: Store, step: int, key: str, routes: Mapping[str, Routes], geometry: Geometry
) -> list[str]:
    """Samples whose routes in a commit differ from ours, in the layers that both have.

    A sample that the commit lacks (another layout wrote it) is not compared.
    Raises TraceError, naming the file; StoreError.
    """
    header = read_training(store, step, key)
    file = file_of(header, "routes")
    if file is None or header.geometry is None:
        raise TraceError(f"{key} in {store.uri}: it lists no routes file, or no geometry")
    common = [layer for layer in geometry.layers if layer in header.geometry.layers]
    part = read_part(store, file, header.geometry, common, range(file.rows))
    differ = set()
    for segment in part.segments.values():
        ours = routes.get(segment.owner)
        if ours is None:
            continue
        start, length = segment.token_start, segment.rows.stop - segment.rows.start
        for layer, theirs_NK in zip(part.layers, part.sets_LNK, strict=True):
            ours_TK = ours.sets_TLK[start : start + length, geometry.layers.index(layer)]
            if not np.array_equal(ours_TK, theirs_NK[segment.rows]):
                differ.add(segment.owner)
    return sorted(differ)
