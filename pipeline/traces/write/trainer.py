"""Writing the routes that a trainer's ranks recorded (R2).

All ranks of an attempt write under the same write id. After all ranks have written their files, one
rank seals them with the step's training.json. Unsealed files are debris.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import Committed, commit, new_write_id
from pipeline.store import ObjectExistsError, Store
from pipeline.traces.format import domain
from pipeline.traces.format.header import TraceFile, with_header
from pipeline.traces.format.manifest import Manifest, open_manifest
from pipeline.traces.format.types import Provenance, Routes, TraceError
from pipeline.traces.read.trainer import TrainerRoutes, joined
from pipeline.traces.write.rows import RoutesWriter
from pipeline.traces.write.writer import check_source, stored_routes


@dataclass(frozen=True)
class NewTrainerRoutes:
    """The properties that the files of all ranks share.

    Raises TraceError if, according to the step's manifest, the trainer does not record routes.
    """

    manifest: Manifest
    """The sealed step. Writing a file requires only the manifest rows of the file's samples."""
    provenance: Provenance
    policies: Mapping[int, str] | None = None
    """Weights digest of the policy version under which the routes were recorded, keyed by that
    version; None if unknown."""
    id: str = field(default_factory=new_write_id)
    """The write id that all ranks share."""

    def __post_init__(self) -> None:
        name = keys.manifest(self.manifest.step)
        if not self.manifest.training:
            raise TraceError(
                f"{name}: according to this manifest, the trainer records no routes for this step"
            )
        if self.provenance.kind != "R2":
            raise TraceError(f"{name}: routes of kind {self.provenance.kind}, expected R2")


def write_trainer_routes(
    store: Store,
    new: NewTrainerRoutes,
    stage: int,
    dp_rank: int,
    routes: Mapping[str, Routes],
    geometry: Geometry,
    *,
    cp_rank: int = 0,
    positions: Mapping[str, npt.NDArray[np.int64]] | None = None,
) -> TraceFile:
    """Write R2 routes for one data-parallel rank's samples, in one pipeline stage's layers.

    The file takes effect only when `seal_trainer_routes` lists it.

    Args:
        store: The store of the run.
        new: What all ranks share.
        stage: The pipeline stage.
        dp_rank: The data-parallel rank.
        routes: Routes, keyed by sample id.
        geometry: The geometry with only this stage's layers.
        cp_rank: The context-parallel rank.
        positions: The ascending positions of the rows in `routes`, keyed by sample id. A
            context-parallel rank passes them, because it has only some rows of each sample. None
            means that `routes` contains all rows.

    Returns:
        The file's description, for `seal_trainer_routes`.

    Raises:
        ObjectExistsError: The file was written before. All ranks must write again, under a new
            write id.
        StoreError: The store failed.
        TraceError: A sample is not in the manifest, or its routes are malformed; the message names
            the sample.
    """
    step, manifest = new.manifest.step, new.manifest
    domain.check_number(stage, domain.MOST_STAGE, f"step {step}: stage")
    domain.check_number(dp_rank, domain.MOST_SHARD, f"step {step}: dp_rank")
    domain.check_number(cp_rank, domain.MOST_SHARD, f"step {step}: cp_rank")
    key = keys.trainer_file(step, stage, dp_rank, new.id, cp_rank)
    check_source(key, new.id, geometry, new.provenance, new.policies)
    rows = manifest.select(list(routes))["rows_total"].to_pylist()
    origin = {"run": manifest.run, "step": step, "stage": stage}
    origin |= {"dp_rank": dp_rank, "cp_rank": cp_rank}
    writer = RoutesWriter(store, key, origin, geometry, new.provenance)
    with writer.file:
        for (id, of_sample), T in zip(routes.items(), rows, strict=True):
            at = np.arange(T) if positions is None else _integers(id, positions[id], T)
            mine = stored_routes(id, of_sample, geometry, len(at))
            whole = mine if positions is None else _spread(mine, at, T)
            for start, end in _runs(at):
                writer.add(id, whole, start, end)
        try:
            return writer.finish()
        except ObjectExistsError as error:
            raise ObjectExistsError(
                f"{error}; the ranks share a write id, so all ranks write again"
            ) from error


def seal_trainer_routes(
    store: Store, new: NewTrainerRoutes, files: Sequence[TraceFile], geometry: Geometry
) -> Committed:
    """Seal the files of all ranks by writing the step's training.json.

    Args:
        store: The store that contains the run.
        new: What all ranks share.
        files: The files of all ranks.
        geometry: The model's geometry, with all MoE layers.

    Returns:
        The commit; its `ours` is False if the step's routes were sealed before. They remain
        unchanged.

    Raises:
        ObjectMissingError: The manifest or a file is missing.
        CorruptObjectError: The manifest or a file is damaged.
        StoreError: The store failed.
        TraceError: The files do not contain every sample of the manifest exactly once in every
            layer.
    """
    manifest = open_manifest(store, new.manifest.step).all()
    if manifest.sha256 != new.manifest.sha256:
        raise TraceError(
            f"{keys.manifest(manifest.step)} in {store.uri}: content {manifest.sha256[:16]}..., "
            f"expected {new.manifest.sha256[:16]}... as in the trainer's routes"
        )
    ordered = tuple(sorted(files, key=lambda file: file.key))
    name = f"trainer routes {new.id} of step {manifest.step} in {store.uri}"
    routes = TrainerRoutes(name, geometry, new.provenance, ordered, new.policies)
    rows = joined(store, manifest, routes).rows
    counts = {name: sum(rows[name].to_pylist()) for name in ("rows_total", "rows_valid")}
    body = {
        "step": manifest.step,
        "manifest_sha256": manifest.sha256,
        "counts": {"samples": len(rows), **counts},
    }
    body = with_header(body, ordered, geometry, new.provenance, new.policies, manifest.run)
    return commit(store, keys.trainer_routes(manifest.step), body, new.id)


def _integers(id: str, positions: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
    """Return ascending positions below `rows` as integers. Raises TraceError for others."""
    if len(positions) == 0:
        return np.empty(0, np.int64)
    integers = positions.dtype.kind in "iu"
    ascends = integers and (np.diff(positions.astype(np.int64), prepend=-1) > 0).all()
    if not ascends or positions[-1] >= rows:
        raise TraceError(
            f"sample {id}: positions {positions}, expected ascending integers below {rows}"
        )
    return positions.astype(np.int64)


def _spread(routes: Routes, positions: npt.NDArray[np.int64], rows: int) -> Routes:
    """Return routes with all rows of a sample; rows at all other positions are invalid."""
    _, layers, topk = routes.sets_TLK.shape
    sets_LTK = np.zeros((layers, rows, topk), routes.sets_TLK.dtype)
    valid_T = np.zeros(rows, np.bool_)
    sets_LTK[:, positions], valid_T[positions] = routes.sets_TLK.swapaxes(0, 1), routes.valid_T
    return replace(routes, sets_TLK=sets_LTK.swapaxes(0, 1), valid_T=valid_T)


def _runs(positions: npt.NDArray[np.int64]) -> Sequence[tuple[int, int]]:
    """Return the ranges [start, end) of consecutive positions."""
    if not len(positions):
        return []
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, cuts)]
