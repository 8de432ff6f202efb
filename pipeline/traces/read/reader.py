"""Reading samples and routes of a sealed step: only the needed layers and row groups are fetched.

Dimensions: T is the number of rows in a sample, L the number of selected layers, K the number of
experts per row, and N the number of rows in some row groups.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.model.geometry import Geometry
from pipeline.run.commit import DataFile
from pipeline.store import Store
from pipeline.threads import in_order
from pipeline.traces.format.domain import check_layers, check_names
from pipeline.traces.format.manifest import Manifest, check_manifest
from pipeline.traces.format.parquet import OpenFile, open_file, read_whole
from pipeline.traces.format.schema import SAMPLES, TOKEN, layer_column, routes_schema
from pipeline.traces.format.types import Routes, Sample, TraceError, VersionSpan

ROUTES_OF = ["id", "rows_total", "routes"]
"""The columns of a manifest by which a sample's routes are found."""
Place = tuple[int, int]
"""The number of a file in the manifest, and the index of a row group in that file."""


def read_samples(store: Store, manifest: Manifest, ids: Iterable[str]) -> list[Sample]:
    """Read samples, leaving out their routes.

    Args:
        store: The store that contains the step.
        manifest: The sealed step.
        ids: The samples to read.

    Returns:
        The samples in the order of `ids`.

    Raises:
        ObjectMissingError: A file is missing.
        CorruptObjectError: A file is damaged.
        TraceError: An id is unknown or is not a str, or a file has other samples than the manifest
            lists. In the second case, the message names the file and the sample.
    """
    step = check_manifest(manifest, "read_samples").step
    ids = check_names(ids, f"step {step}: ids")
    found = {sample.id: sample for sample in stored_samples(store, manifest, manifest.select(ids))}
    return [found[id] for id in ids]


def every_sample(store: Store, manifest: Manifest) -> Iterator[Sample]:
    """Yield all samples of a step without their routes, file by file.

    Each row group is read once, and only one is in memory at a time. Raises the same errors as
    `read_samples`.
    """
    return stored_samples(store, manifest, manifest.rows)


def stored_samples(store: Store, manifest: Manifest, rows: pa.Table) -> Iterator[Sample]:
    """Yield samples without their routes, file by file and one row group at a time.

    Args:
        store: The store that contains the step.
        manifest: The sealed step.
        rows: Rows of the manifest. Raises the same errors as `read_samples`.
    """
    places = rows["samples"].combine_chunks()
    file_N, row_N = (pc.struct_field(places, name).to_numpy() for name in ("file", "row"))
    ids = rows["id"].to_pylist()
    for number in dict.fromkeys(file_N.tolist()):
        opened = open_file(store, file_at(manifest, number))
        here = np.flatnonzero(file_N == number)
        group_N = opened.groups_of(row_N[here])
        for group in dict.fromkeys(group_N.tolist()):
            table = opened.read(SAMPLES, [group])
            for i in here[group_N == group].tolist():
                sample = _sample(table, int(row_N[i] - opened.first_rows[group]))
                if sample.id != ids[i]:
                    raise TraceError(
                        f"{opened.name}: row {row_N[i]} is sample {sample.id}, but the manifest "
                        f"lists {ids[i]}; remake the step"
                    )
                yield sample


def file_at(manifest: Manifest, number: int) -> Any:
    """Return a manifest's file by its number. Raises TraceError if it has no such file."""
    if not 0 <= number < len(manifest.files):
        raise TraceError(
            f"step {manifest.step}: a sample refers to file {number} of {len(manifest.files)}; "
            "remake the step"
        )
    return manifest.files[number]


def read_sample_file(store: Store, file: DataFile) -> list[Sample]:
    """Read all samples from a validation's file (see `write_samples`), and check its digest."""
    table = read_whole(store, file, SAMPLES)
    return [_sample(table, i) for i in range(len(table))]


def _sample(table: pa.Table, i: int) -> Sample:
    """Return the sample in row i of a samples table, without its routes."""

    def array(column: str) -> Any:
        return table[column][i].values.to_numpy(zero_copy_only=False)

    def value(column: str) -> Any:
        return table[column][i].as_py()

    return Sample(
        id=value("id"),
        group=value("group"),
        prompt_id=value("prompt_id"),
        prompt_tokens_P=array("prompt_tokens"),
        response_tokens_G=array("response_tokens"),
        loss_mask_G=array("loss_mask"),
        logprobs_G=array("logprobs"),
        finish_reason=value("finish_reason"),
        version_spans=tuple(VersionSpan(**span) for span in value("version_spans")),
        seed=value("seed"),
        reward=value("reward"),
        reward_error=value("reward_error"),
        extras=json.loads(value("extras")),
        routes=None,
        branch_of=value("branch_of"),
    )


def read_routes(
    store: Store, manifest: Manifest, ids: Iterable[str], layers: Iterable[int] | None = None
) -> dict[str, Routes]:
    """Read the routes of samples. Only the bytes of the given layers are fetched.

    Args:
        store: The store that contains the step.
        manifest: The sealed step.
        ids: The samples whose routes are read.
        layers: Model indices of L layers; None reads all.

    Returns:
        Routes with sets [T, L, K], keyed by sample id. The layers are in the given order.

    Raises:
        ObjectMissingError: A file is missing.
        CorruptObjectError: A file is damaged.
        TraceError: An id or a layer is unknown or malformed, or the files lack rows of a sample.
            The message names the file or the sample.
    """
    step = check_manifest(manifest, "read_routes").step
    ids = check_names(ids, f"step {step}: ids")
    geometry = selected_layers(manifest, layers)
    rows = manifest.select(ids).select(ROUTES_OF).to_pylist()
    opened = open_routes(store, manifest, rows, geometry.layers)
    needed = [groups_of(row, opened) for row in rows]
    wanted = sorted({place for of_sample in needed for place in of_sample})

    def read(place: Place) -> Part:
        number, group = place
        return opened[number].read([group])[group]

    parts = dict(zip(wanted, in_order(read, wanted, at_once=4), strict=True))
    lent = mostly_needed(needed, opened)
    return {row["id"]: join(row, geometry, opened, parts, lent) for row in rows}


def selected_layers(manifest: Manifest, layers: Iterable[int] | None) -> Geometry:
    """Return the geometry of some layers of a manifest's routes. Raises TraceError."""
    step, geometry = manifest.step, manifest.geometry
    if geometry is None:
        raise TraceError(f"step {step}: no routes in its samples")
    where = f"step {step}: layers"
    wanted = geometry.layers if layers is None else check_layers(layers, where)
    if unknown := sorted(set(wanted) - set(geometry.layers)):
        raise TraceError(
            f"step {step}: no routes for layers {unknown}, expected layers of {geometry.layers}"
        )
    if not wanted or len(set(wanted)) != len(wanted):
        raise TraceError(f"{where} {list(wanted)}, expected at least one, and each once")
    return Geometry(geometry.experts, geometry.topk, wanted)


@dataclass(frozen=True)
class RoutesFile:
    """An open routes file and the layers to read from it."""

    opened: OpenFile
    geometry: Geometry
    """Geometry with only the selected layers that the file contains."""
    at_L: slice | list[int]
    """The places of these layers among all selected layers."""

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns to read."""
        layers = routes_schema(self.geometry)
        return pa.schema([TOKEN.field("valid"), *(f for f in layers if f not in TOKEN)])

    def bytes_of(self, group: int) -> int:
        """Return how many bytes a row group's columns take."""
        return self.opened.bytes_of(self.schema.names, [group])

    def read(self, groups: Sequence[int]) -> dict[int, "Part"]:
        """Fetch and decode the selected layers of some row groups. Raises like `OpenFile.read`."""
        table = self.opened.read(self.schema, groups)
        found, start = {}, 0
        for group in groups:  # each has its own memory, which samples may keep
            first, end = self.opened.starts[group : group + 2]
            found[group] = self._part(first, table.slice(start, end - first))
            start += end - first
        return found

    def _part(self, first: int, table: pa.Table) -> "Part":
        shape = (len(self.geometry.layers), len(table), self.geometry.topk)
        sets_LNK = np.empty(shape, self.geometry.dtype)
        for layer, sets_NK in zip(self.geometry.layers, sets_LNK, strict=True):
            start = 0
            for chunk in table[layer_column(layer)].chunks:
                sets_NK[start : start + len(chunk)] = _sets(chunk, sets_NK)
                start += len(chunk)
        valid_N = table["valid"].combine_chunks().to_numpy(zero_copy_only=False)
        return Part(first, sets_LNK, valid_N)


@dataclass(frozen=True)
class Part:
    """A decoded row group of a routes file."""

    first: int
    """The number of the group's first row in the file."""
    sets_LNK: npt.NDArray[Any]
    valid_N: npt.NDArray[np.bool_]

    def rows(self, rows: range) -> tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]:
        """Return the sets and the validity of some of the file's rows, without a copy."""
        here = slice(rows.start - self.first, rows.stop - self.first)
        return self.sets_LNK[:, here], self.valid_N[here]


def _sets(chunk: pa.FixedSizeBinaryArray, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the expert ids [N, K] of an array, without a copy."""
    stored = np.dtype(like.dtype).newbyteorder("<")
    topk = like.shape[1]
    ids = np.frombuffer(chunk.buffers()[1], stored)
    return ids[chunk.offset * topk : (chunk.offset + len(chunk)) * topk].reshape(-1, topk)


def open_routes(
    store: Store,
    manifest: Manifest,
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[int],
) -> dict[int, RoutesFile]:
    """Open the files that contain selected layers of some samples, keyed by number.

    Args:
        store: The store that contains the step.
        manifest: The sealed step.
        rows: Rows of the manifest.
        layers: Model indices of the selected layers.
    """
    found = {}
    head = manifest.geometry
    numbers = sorted({part["file"] for row in rows for part in row["routes"] or []})
    here = {n: [i for i in layers if i in file_at(manifest, n).layers] for n in numbers}
    wanted = [number for number in numbers if here[number]]
    files = in_order(lambda number: open_file(store, manifest.files[number]), wanted)
    for number, opened in zip(wanted, files, strict=True):
        if head is not None:
            geometry = Geometry(head.experts, head.topk, tuple(here[number]))
            whole = geometry.layers == tuple(layers)  # all can be copied at once
            at_L = slice(None) if whole else [layers.index(layer) for layer in geometry.layers]
            found[number] = RoutesFile(opened, geometry, at_L)
    return found


def groups_of(row: Mapping[str, Any], files: Mapping[int, RoutesFile]) -> Counter[Place]:
    """Return how many of a sample's rows each row group contains."""
    found: Counter[Place] = Counter()
    for place, _, rows in _pieces(row, files):
        found[place] += len(rows)
    return found


def mostly_needed(needed: Iterable[Counter[Place]], files: Mapping[int, RoutesFile]) -> set[Place]:
    """Return the row groups of which the samples need at least half of the rows.

    Args:
        needed: How many rows each sample needs of each row group.
        files: The open files.
    """
    rows: Counter[Place] = Counter()
    for of_sample in needed:
        rows.update(of_sample)
    starts = {number: file.opened.starts for number, file in files.items()}
    return {
        (number, group)
        for (number, group), count in rows.items()
        if 2 * count >= starts[number][group + 1] - starts[number][group]
    }


def join(
    row: Mapping[str, Any],
    geometry: Geometry,
    files: Mapping[int, RoutesFile],
    parts: Mapping[Place, Part],
    lent: Set[Place],
) -> Routes:
    """Return the routes of a sample, in the layers of `geometry`.

    Args:
        row: The sample's row in the manifest.
        geometry: The geometry with the selected layers.
        files: The open files.
        parts: Decoded row groups.
        lent: The row groups whose memory the sample may share instead of copying its rows.

    Raises:
        TraceError: The files lack a row of the sample in some layer.
    """
    T = row["rows_total"]
    pieces = list(_pieces(row, files))
    if len(pieces) == 1:
        ((place, start, rows),) = pieces
        if place in lent and files[place[0]].at_L == slice(None) and (start, len(rows)) == (0, T):
            sets_LTK, valid_T = parts[place].rows(rows)
            return Routes(sets_LTK.swapaxes(0, 1), valid_T)
    # A layer's rows are contiguous, as in the file, so they can be copied in one piece.
    sets_LTK = np.empty((len(geometry.layers), T, geometry.topk), geometry.dtype)
    valid_T = np.empty(T, np.bool_)
    covered_L = np.zeros(len(geometry.layers), np.int64)
    for place, start, rows in pieces:
        at_L, to = files[place[0]].at_L, slice(start, start + len(rows))
        sets_LTK[at_L, to], valid_T[to] = parts[place].rows(rows)
        covered_L[at_L] += len(rows)
    if T and np.count_nonzero(lacking_L := covered_L != T):
        at = int(lacking_L.argmax())
        raise TraceError(
            f"sample {row['id']}: {covered_L[at]} rows of routes in layer {geometry.layers[at]}, "
            f"expected {T}: one per token except the last; remake the step"
        )
    return Routes(sets_LTK.swapaxes(0, 1), valid_T)


def _pieces(
    row: Mapping[str, Any], files: Mapping[int, RoutesFile]
) -> Iterator[tuple[Place, int, range]]:
    """Yield, for each row group with rows of a sample, the first position and the file's rows."""
    for part in row["routes"] or []:
        if (file := files.get(part["file"])) is None:
            continue
        for segment in part["segments"]:
            at, end = segment["row"], segment["row"] + segment["tokens"]
            while at < end:
                group = file.opened.group_of(at)
                stop = min(end, file.opened.starts[group + 1])
                start = segment["start"] + at - segment["row"]
                yield (part["file"], group), start, range(at, stop)
                at = stop
