"""Writing the parts of a training set: the routes that a trainer's ranks recorded (R2).

All ranks of an attempt write under the same write id, which is the id of the set. After all ranks
have written their parts, one rank seals the set (pipeline.traces.training_sets). An unsealed set is
debris.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import Committed, commit, new_write_id
from pipeline.store import ObjectExistsError, Store
from pipeline.traces.format import domain
from pipeline.traces.format.digests import digest_of_canonical
from pipeline.traces.format.header import with_header
from pipeline.traces.format.manifest import Manifest
from pipeline.traces.format.types import Provenance, Routes, TraceError
from pipeline.traces.write.checked import canonical_routes, check_source
from pipeline.traces.write.routes_file import RoutesFile
from pipeline.traces.write.segments import SegmentWriter

_NEEDED = ("token_digest", "rows_total")


@dataclass(frozen=True)
class NewTrainingSet:
    """The properties that all parts of a training set share.

    Raises TraceError if, according to the step's manifest, the trainer does not record routes.
    """

    manifest: Manifest
    """The sealed step. Writing a part requires only the manifest rows of the part's samples."""
    provenance: Provenance
    policies: Mapping[int, str] | None = None
    """Weights digest of the policy version under which the routes were recorded, keyed by that
    version; None if unknown."""
    id: str = field(default_factory=new_write_id)
    """The write id that all ranks share."""

    def __post_init__(self) -> None:
        name = keys.manifest(self.manifest.step)
        if self.manifest.format != "1.0" and not self.manifest.training:
            raise TraceError(
                f"{name}: according to this manifest, the trainer records no routes for this step"
            )
        if self.provenance.kind != "R2":
            raise TraceError(f"{name}: routes of kind {self.provenance.kind}, expected R2")


def write_training_routes(
    store: Store,
    new: NewTrainingSet,
    stage: int,
    dp_rank: int,
    routes: Mapping[str, Routes],
    geometry: Geometry,
    *,
    cp_rank: int = 0,
    positions: Mapping[str, npt.NDArray[np.int64]] | None = None,
) -> Committed:
    """Write R2 routes for one data-parallel rank's samples, in one pipeline stage's layers.

    The part takes effect only when the set is sealed.

    Args:
        store: The store of the run.
        new: The set to which the part belongs.
        stage: The pipeline stage.
        dp_rank: The data-parallel rank.
        routes: Routes, keyed by sample id.
        geometry: The geometry with only this stage's layers.
        cp_rank: The context-parallel rank.
        positions: The ascending positions of the rows in `routes`, keyed by sample id. A
            context-parallel rank passes them, because it has only some rows of each sample. None
            means that `routes` contains all rows.

    Returns:
        The commit; its `ours` is False if the part already existed.

    Raises:
        ObjectExistsError: The part was written before, but not committed. All ranks must write the
            set again, under a new write id.
        StoreError: The store failed.
        TraceError: A sample is not in the manifest, or its routes are malformed; the message names
            the sample.
    """
    step, manifest = new.manifest.step, new.manifest
    domain.check_number(stage, domain.MOST_STAGE, f"step {step}: stage")
    domain.check_number(dp_rank, domain.MOST_SHARD, f"step {step}: dp_rank")
    domain.check_number(cp_rank, domain.MOST_SHARD, f"step {step}: cp_rank")
    key = keys.training(step, stage, dp_rank, new.id, cp_rank)
    check_source(key, new.id, geometry, new.provenance, new.policies)
    tokens, rows = (manifest.select(list(routes))[name].to_pylist() for name in _NEEDED)
    name = keys.training_file(step, stage, dp_rank, new.id, cp_rank)
    digests: list[list[Any]] = []
    with RoutesFile(store, name, geometry, new.provenance) as file:
        segments = SegmentWriter(file)
        for (id, of_sample), digest, T in zip(routes.items(), tokens, rows, strict=True):
            at = np.arange(T) if positions is None else _integers(id, positions[id])
            mine = canonical_routes(id, of_sample, geometry, len(at))
            whole = mine if positions is None else _spread(id, mine, at, T)
            for start, end in _runs(at):
                segments.add(id, whole, start, end)
            known = int(mine.valid_T.sum())
            digests.append([id, digest, digest_of_canonical(mine, geometry), len(at), known])
        segments.finish()
        try:
            written = file.finish()
        except ObjectExistsError as error:
            raise ObjectExistsError(
                f"{error}; the ranks share the write id of a training set, so all ranks write the "
                "set again"
            ) from error
    body: dict[str, Any] = {
        "step": step,
        "stage": stage,
        "dp_rank": dp_rank,
        "samples": len(digests),
        "manifest_sha256": manifest.sha256,
        "digests": digests,
    }
    if cp_rank:
        body["cp_rank"] = cp_rank
    body = with_header(body, [written], geometry, new.provenance, new.policies)
    return commit(store, key, body, new.id)


def _integers(id: str, positions: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return positions as integers. A list without elements becomes an array of floats in numpy."""
    if len(positions) and positions.dtype.kind not in "iu":
        raise TraceError(
            f"sample {id}: positions of type {positions.dtype}, expected integers [rows]"
        )
    return positions.astype(np.int64)


def _spread(id: str, routes: Routes, positions: npt.NDArray[np.int64], rows: int) -> Routes:
    """Return routes with all rows of a sample; rows at all other positions are invalid."""
    ascends = (np.diff(positions, prepend=-1) > 0).all()
    if len(positions) > rows or not ascends or (len(positions) and positions[-1] >= rows):
        raise TraceError(
            f"sample {id}: positions {positions}, expected ascending positions below {rows}"
        )
    _, layers, topk = routes.sets_TLK.shape
    sets_LTK = np.zeros((layers, rows, topk), routes.sets_TLK.dtype)
    valid_T = np.zeros(rows, np.bool_)
    sets_LTK[:, positions], valid_T[positions] = routes.sets_TLK.swapaxes(0, 1), routes.valid_T
    return Routes(sets_LTK.swapaxes(0, 1), valid_T)


def _runs(positions: npt.NDArray[np.int64]) -> Sequence[tuple[int, int]]:
    """Return the ranges [start, end) of consecutive positions."""
    if not len(positions):
        return []
    cuts = np.flatnonzero(np.diff(positions) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(positions, cuts)]
