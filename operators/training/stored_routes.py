"""Stores the routes that the log-prob pass recorded (R2), next to the step's samples.

    every stage, data- and context-parallel rank: its part ─► all parts ─► rank 0: training.json

All parts of an attempt share one write id. An attempt that died before it wrote training.json
leaves debris, and the next attempt writes its own training set, perhaps in a different layout. An
attempt that died later leaves the step's training set, and the next attempt compares its own
recorded routes with that set.
"""

import logging
from collections.abc import Mapping
from importlib.metadata import version

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch.distributed as dist

from operators.training.agree import agreed, await_ranks, gathered
from operators.training.batches.zigzag import Zigzag
from operators.training.errors import ReplayError
from operators.training.rank import Rank
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.amendments import description_at
from pipeline.run.commit import new_write_id
from pipeline.store import Store
from pipeline.traces import Manifest, NewTrainingSet, seal_training_set, write_training_routes
from pipeline.traces.format.chunks import read_table
from pipeline.traces.format.manifest import file_of
from pipeline.traces.format.schema import SEGMENT
from pipeline.traces.format.types import Provenance, Routes, TraceError
from pipeline.traces.read.parts import Part, read_part
from pipeline.traces.read.training import read_training_set

logger = logging.getLogger(__name__)

_OWNERS = pa.schema([SEGMENT.field("owner")])


def store_routes(
    store: Store,
    rank: Rank,
    manifest: Manifest,
    routes: Mapping[str, Routes],
    policies: Mapping[int, str] | None,
) -> int:
    """Store the routes of this rank's log-prob pass (R2), or compare them with stored routes.

    Every rank must call this. The first rank of each tensor-parallel group stores the routes, which
    are the same on all ranks of the group. Every context-parallel rank has the routes of entire
    samples, but stores only the rows for the positions that it holds in a packed row.

    Args:
        store: The run's store.
        rank: This training rank.
        manifest: The step's manifest, with the rows of this rank's samples.
        routes: The recorded routes, keyed by sample id.
        policies: Weights digest of the policy version under which the routes were recorded, keyed
            by version; None if unknown.

    Returns:
        On all ranks, the number of samples whose stored routes differ from those that this trainer
        replayed. The number may be above 0 after a restart if kernels are not deterministic.
    """
    step, position, geometry = manifest.step, rank.position, rank.geometry
    if position.tensor_rank or geometry is None or not geometry.layers:
        geometry = None
    there = agreed(lambda: store.size(keys.training_set(step)) is not None)
    if not there:
        made = Provenance("R2", step, f"megatron-core {version('megatron-core')}")
        new = NewTrainingSet(manifest, made, policies, agreed(new_write_id))
        if geometry is not None:
            own, positions = _own_part(position.context, position.sequence.count, routes)
            write_training_routes(
                store,
                new,
                position.stage,
                position.dp_rank,
                own,
                geometry,
                cp_rank=position.context.index,
                positions=positions,
            )
        await_ranks()
        if dist.get_rank() == 0:
            seal_training_set(store, new, _model_geometry(store, step))
        return 0
    differ = []
    if geometry is not None and position.context.index == 0:
        differ = other_routes(store, manifest, routes, geometry)
    samples = sorted({id for ids in gathered(differ) for id in ids})
    if samples and dist.get_rank() == 0:
        logger.warning(
            "step %d: the stored routes of %d samples (the first is %s) differ from those that "
            "were recorded and replayed when the step was trained again (counted as "
            "resume/routes_drift)",
            step,
            len(samples),
            samples[0],
        )
    return len(samples)


def _own_part(
    context: Zigzag, sequence_slices: int, routes: Mapping[str, Routes]
) -> tuple[Mapping[str, Routes], Mapping[str, npt.NDArray[np.int64]] | None]:
    """Return the routes of this context-parallel rank's rows, and the positions of the rows.

    The positions are None if the rank has all rows. A short sample may have no rows on this rank,
    and is then left out.
    """
    if context.count == 1:
        return routes, None
    positions = {
        id: context.held_of(len(whole.valid_T), sequence_slices) for id, whole in routes.items()
    }
    positions = {id: at for id, at in positions.items() if len(at)}
    own = {
        id: Routes(np.ascontiguousarray(routes[id].sets_TLK[at]), routes[id].valid_T[at])
        for id, at in positions.items()
    }
    return own, positions


def other_routes(
    store: Store, manifest: Manifest, routes: Mapping[str, Routes], geometry: Geometry
) -> list[str]:
    """Return the ids of samples whose stored routes differ from the routes that this rank recorded.

    Only this rank's layers are compared. The stored training set may have a different layout.

    Args:
        store: The run's store.
        manifest: The step's manifest, with the rows of this rank's samples.
        routes: This rank's routes, keyed by sample id.
        geometry: Geometry of this rank's MoE layers.

    Raises:
        TraceError: A stored file is corrupt; the message names it.
        StoreError: The store failed.
    """
    same = dict.fromkeys(routes, 0)
    for header in read_training_set(store, manifest).commits:
        file = file_of(header, "routes")
        if file is None or header.geometry is None:
            raise TraceError(
                f"{header.key} in {store.uri}: the commit lists no routes file or no geometry"
            )
        common = [layer for layer in geometry.layers if layer in header.geometry.layers]
        owners = read_table(store, file, _OWNERS)["owner"].to_pylist() if common else []
        mine = [row for row, owner in enumerate(owners) if owner in routes]
        if mine:
            part = read_part(store, file, header.geometry, common, mine)
            for id, equal in _equal_rows(part, routes, geometry):
                same[id] += equal
    layers = len(geometry.layers)
    return sorted(id for id, equal in same.items() if equal != layers * len(routes[id].valid_T))


def _equal_rows(
    part: Part, routes: Mapping[str, Routes], geometry: Geometry
) -> list[tuple[str, int]]:
    """Return, for each segment, its sample and the number of equal rows, summed over all layers."""
    found = []
    for segment in part.segments.values():
        ours = routes[segment.owner]
        length = segment.rows.stop - segment.rows.start
        here = slice(segment.token_start, segment.token_start + length)
        valid_T = ours.valid_T[here] == part.valid_N[segment.rows]
        equal = 0
        for layer, sets_NK in zip(part.layers, part.sets_LNK, strict=True):
            ours_TK = ours.sets_TLK[here, geometry.layers.index(layer)]
            equal += int((valid_T & (ours_TK == sets_NK[segment.rows]).all(axis=1)).sum())
        found.append((segment.owner, equal))
    return found


def _model_geometry(store: Store, step: int) -> Geometry:
    """Return the geometry of the model's MoE layers from the run description."""
    geometry = description_at(store, step).geometry
    if geometry is None:
        raise ReplayError(
            f"{keys.run_json()} in {store.uri}: the model has no MoE layers, but the trainer "
            "recorded routes; start a new run (another trainer.experiment_name)"
        )
    return geometry
