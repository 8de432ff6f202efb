"""The routes that the trainer recorded in a step (R2), and the join of a step with them.

The files of all ranks together contain each row of each sample once in every layer: pipeline stages
have different layers, data-parallel ranks different samples, context-parallel ranks different
positions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.store import Store
from pipeline.threads import in_order
from pipeline.traces.format.header import TraceFile, read_header, united
from pipeline.traces.format.manifest import Manifest, read_manifest
from pipeline.traces.format.parquet import open_file
from pipeline.traces.format.schema import MANIFEST, TOKEN
from pipeline.traces.format.types import Provenance, TraceError


@dataclass(frozen=True)
class TrainerRoutes:
    """The files that contain the routes recorded by a step's trainer."""

    name: str
    """The object that lists the files, for messages."""
    geometry: Geometry
    """Geometry with all layers of the files."""
    provenance: Provenance
    files: tuple[TraceFile, ...]
    policies: Mapping[int, str] | None = None
    """Weights digests, keyed by policy version; None if unknown."""


def used_routes(store: Store, step: int) -> Manifest:
    """Read a sealed step with the routes that its training used.

    If the trainer records routes (R2), these replace the manifest's routes; the rows of a sample
    may then be in several files. Raises TraceError if the trainer has not recorded the routes yet,
    or if its files do not contain every sample exactly once in every layer.
    """
    manifest = read_manifest(store, step)
    found = find_trainer_routes(store, manifest)
    return manifest if found is None else joined(store, manifest, found)


def find_trainer_routes(store: Store, manifest: Manifest) -> TrainerRoutes | None:
    """Return a step's trainer routes; None if the trainer does not record the step's routes.

    The manifest's rows are not needed. Raises TraceError if the routes are missing or belong to a
    different step, and CorruptObjectError if training.json is damaged.
    """
    if not manifest.training:
        return None
    key = keys.trainer_routes(manifest.step)
    if store.size(key) is None:
        raise TraceError(
            f"{key} in {store.uri}: no such object, but according to "
            f"{keys.manifest(manifest.step)} the trainer records this step's routes: they are not "
            "recorded yet, or were removed; wait until the step is trained, or restore the object"
        )
    header = read_header(store, key, {"step": manifest.step, "manifest_sha256": manifest.sha256})
    name = f"{key} in {store.uri}"
    if header.geometry is None or header.provenance is None:
        raise TraceError(f"{name}: no geometry or provenance; restore the object")
    return TrainerRoutes(name, header.geometry, header.provenance, header.files, header.policies)


def joined(store: Store, manifest: Manifest, trainer: TrainerRoutes) -> Manifest:
    """Return a manifest in which the trainer's routes replace the original ones.

    Args:
        store: The store that contains the step.
        manifest: The sealed step, with all its rows.
        trainer: The step's trainer routes.

    Raises:
        TraceError: The files do not contain every sample exactly once in every layer, or a row is
            valid in some layers only.
    """
    if manifest.geometry not in (None, trainer.geometry):
        raise TraceError(
            f"{trainer.name}: routes for {trainer.geometry}, but {keys.manifest(manifest.step)} "
            f"has {manifest.geometry}; remake the step"
        )
    layers = sorted({layer for file in trainer.files for layer in file.layers})
    if layers != list(trainer.geometry.layers):
        raise TraceError(
            f"{trainer.name}: its files have routes for layers {layers}, expected "
            f"{list(trainer.geometry.layers)}"
        )
    step = _Rows(manifest)
    located: dict[str, list[dict[str, Any]]] = {id: [] for id in manifest.ids}
    first = len(manifest.files)
    tables = in_order(lambda file: open_file(store, file).read(TOKEN), trainer.files)
    rows_of_layers: dict[tuple[int, ...], list[tuple[npt.NDArray[np.int64], Any]]] = {}
    for number, (file, table) in enumerate(zip(trainer.files, tables, strict=True), first):
        at_N = step.places(table, file.key)
        rows_of_layers.setdefault(file.layers, []).append((at_N, table["valid"].to_numpy()))
        for id, segments in _segments(table):
            located[id].append({"file": number, "segments": segments})
    _check_stages(trainer, list(rows_of_layers))
    valid = step.alike(
        trainer.name,
        [
            step.ordered(found, f"{trainer.name}: layers {list(layers)}")
            for layers, found in rows_of_layers.items()
        ],
    )
    columns = {
        "routes": [located[id] for id in manifest.ids],
        "rows_valid": [int(of.sum()) for of in np.split(valid, step.ends[:-1])],
    }
    table = manifest.rows
    for name, values in columns.items():
        field = MANIFEST.field(name)
        table = table.set_column(
            table.schema.get_field_index(name), field, pa.array(values, field.type)
        )
    return replace(
        manifest,
        geometry=trainer.geometry,
        provenance=trainer.provenance,
        policies=united([("the manifest", manifest.policies), (trainer.name, trainer.policies)]),
        files=(*manifest.files, *trainer.files),
        rows=table,
    )


class _Rows:
    """All rows of a step, in the order of its samples."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        totals = manifest.rows["rows_total"].to_numpy()
        self.ends = np.cumsum(totals)
        self._starts = self.ends - totals
        self._totals = totals
        self.total = int(self.ends[-1]) if len(totals) else 0

    def places(self, table: pa.Table, key: str) -> npt.NDArray[np.int64]:
        """Return the step's row of each row of a routes file. Raises TraceError for other rows."""
        samples = table["sample"].combine_chunks().dictionary_encode()
        ids = samples.dictionary.to_pylist()
        if unknown := [id for id in ids if id not in self._manifest.numbers]:
            raise TraceError(f"{key}: sample {unknown[0]} is not in the step's manifest")
        numbers = np.array([self._manifest.numbers[id] for id in ids], np.int64)
        sample_N = numbers[samples.indices.to_numpy()]
        position_N = table["position"].to_numpy()
        beyond = (position_N < 0) | (position_N >= self._totals[sample_N])
        if beyond.any():
            i = int(beyond.argmax())
            raise TraceError(
                f"{key}: position {position_N[i]} of sample {self._manifest.ids[sample_N[i]]}, "
                f"which has {self._totals[sample_N[i]]} rows"
            )
        return np.asarray(self._starts[sample_N] + position_N, np.int64)

    def ordered(
        self, found: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]], name: str
    ) -> npt.NDArray[np.bool_]:
        """Return the validity of each of the step's rows.

        Args:
            found: The step's rows in each file, and their validity.
            name: The files, for the error message.

        Raises:
            TraceError: A row is missing, or occurs twice.
        """
        at_N = np.concatenate([at for at, _ in found])
        counts = np.bincount(at_N, minlength=self.total)
        if (counts != 1).any():
            row = int((counts != 1).argmax())
            sample, position = self._at(row)
            what = "is missing" if counts[row] == 0 else "occurs twice"
            raise TraceError(f"{name}: sample {sample}: position {position} {what}")
        valid = np.empty(self.total, np.bool_)
        valid[at_N] = np.concatenate([valid_N for _, valid_N in found])
        return valid

    def alike(self, name: str, valid: Sequence[npt.NDArray[np.bool_]]) -> npt.NDArray[np.bool_]:
        """Return the validity that all layers share. Raises TraceError if they differ."""
        for other in valid[1:]:
            if (differs := valid[0] != other).any():
                sample, position = self._at(int(differs.argmax()))
                raise TraceError(
                    f"{name}: sample {sample}: position {position} is valid in some layers only"
                )
        return valid[0]

    def _at(self, row: int) -> tuple[str, int]:
        sample = int(np.searchsorted(self.ends, row, side="right"))
        return self._manifest.ids[sample], row - int(self._starts[sample])


def _segments(table: pa.Table) -> list[tuple[str, list[dict[str, int]]]]:
    """Return the samples of a routes file, each with the segments that contain its rows."""
    if not len(table):
        return []
    samples = table["sample"].combine_chunks().dictionary_encode()
    code_N, position_N = samples.indices.to_numpy(), table["position"].to_numpy()
    breaks = (np.diff(code_N) != 0) | (np.diff(position_N) != 1)
    starts = np.concatenate([[0], np.flatnonzero(breaks) + 1])
    ends = np.concatenate([starts[1:], [len(table)]])
    found: dict[int, list[dict[str, int]]] = {}
    for row, end, start, code in zip(
        starts.tolist(),
        ends.tolist(),
        position_N[starts].tolist(),
        code_N[starts].tolist(),
        strict=True,
    ):
        found.setdefault(code, []).append({"start": start, "row": row, "tokens": end - row})
    ids = samples.dictionary.to_pylist()
    return [(ids[code], segments) for code, segments in found.items()]


def _check_stages(trainer: TrainerRoutes, stages: Sequence[tuple[int, ...]]) -> None:
    """Raise TraceError if a layer is in files with different sets of layers."""
    layers = [layer for stage in stages for layer in stage]
    if len(set(layers)) != len(layers):
        twice = sorted({layer for layer in layers if layers.count(layer) > 1})
        raise TraceError(f"{trainer.name}: layers {twice} are in files of several pipeline stages")
