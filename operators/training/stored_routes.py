"""Stores the routes that the log-prob pass recorded (R2), next to the step's samples.

    every stage, data- and context-parallel rank: its file ─► all files ─► rank 0: training.json

All files of an attempt share one write id. An attempt that died before it wrote training.json
leaves debris, and the next attempt writes its own files, perhaps in a different layout. An attempt
that died later leaves the step's routes, and the next attempt compares its own recorded routes with
these.
"""

import logging
from collections.abc import Mapping
from importlib.metadata import version

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from operators.training.agree import agreed, gathered
from operators.training.errors import ReplayError
from operators.training.rank import Rank
from operators.zigzag import Zigzag
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.run.description import read_created
from pipeline.store import Store
from pipeline.traces import (
    Manifest,
    NewTrainerRoutes,
    read_routes,
    seal_trainer_routes,
    used_routes,
    write_trainer_routes,
)
from pipeline.traces.format.types import Provenance, Routes

logger = logging.getLogger(__name__)


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
    there = agreed(lambda: store.size(keys.trainer_routes(step)) is not None)
    if not there:
        made = Provenance("R2", step, f"megatron-core {version('megatron-core')}")
        new = NewTrainerRoutes(manifest, made, policies, agreed(new_write_id))
        file = None
        if geometry is not None:
            own, positions = _own_part(position.context, position.sequence.count, routes)
            file = write_trainer_routes(
                store,
                new,
                position.stage,
                position.dp_rank,
                own,
                geometry,
                cp_rank=position.context.index,
                positions=positions,
            )
        files = [of_rank for of_rank in gathered(file) if of_rank is not None]
        if dist.get_rank() == 0:
            seal_trainer_routes(store, new, files, _model_geometry(store))
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

    Only this rank's layers are compared. The stored routes may come from a different layout.

    Args:
        store: The run's store.
        manifest: The step's manifest, with the rows of this rank's samples.
        routes: This rank's routes, keyed by sample id.
        geometry: Geometry of this rank's MoE layers.

    Raises:
        TraceError, CorruptObjectError: A stored file is damaged; the message names it.
        StoreError: The store failed.
    """
    stored = used_routes(store, manifest.step)
    differ = []
    for ids in stored.id_batches(routes):
        for id, found in read_routes(store, stored, ids, geometry.layers).items():
            ours = routes[id]
            same_T = (found.sets_TLK == ours.sets_TLK).all(axis=(1, 2)) | ~ours.valid_T
            if not (same_T.all() and np.array_equal(found.valid_T, ours.valid_T)):
                differ.append(id)
    return sorted(differ)


def _model_geometry(store: Store) -> Geometry:
    """Return the geometry of the model's MoE layers from the run description."""
    geometry = read_created(store).geometry
    if geometry is None:
        raise ReplayError(
            f"{keys.run_json()} in {store.uri}: the model has no MoE layers, but the trainer "
            "recorded routes; start a new run (another trainer.experiment_name)"
        )
    return geometry
