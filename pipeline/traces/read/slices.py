"""Routes of samples, joined from the segments that hold them.

Nothing is trusted: segments name their owner and position, coded sets are bounded, and the rows of
a sample must be exactly its positions, once in every layer.

Letters: T rows of a sample, L wanted layers, K experts per row, N rows of several segments.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.model.geometry import Geometry
from pipeline.store import Store
from pipeline.traces.format.chunks import TraceFile, read_table
from pipeline.traces.format.codec import decode_segments
from pipeline.traces.format.digests import digest_of_canonical
from pipeline.traces.format.schema import SEGMENT, layer_column, routes_schema
from pipeline.traces.format.types import Routes, TraceError


@dataclass(frozen=True)
class Segment:
    """A segment, decoded."""

    owner: str
    token_start: int
    rows: slice
    """Its rows in the arrays of its part."""


@dataclass(frozen=True)
class Part:
    """Segments of one routes file, decoded."""

    key: str
    segments: Mapping[int, Segment]
    """By row of the file."""
    sets: Mapping[int, npt.NDArray[Any]]
    """By layer: [N, K]."""
    valid_N: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Slices:
    """Fetched routes of some samples."""

    geometry: Geometry
    """Geometry with the wanted layers only."""
    parts: Mapping[int, Part]
    """Parts by the file's number in the manifest."""
    rows: Mapping[str, dict[str, Any]]
    """Manifest rows by sample id."""
    whole: bool
    """Whether every layer of the step is wanted, so that the digest can be compared."""

    def routes(self, id: str) -> Routes:
        """The routes of one sample, compared with the sample's row in the manifest.

        Raises TraceError, naming file and sample.
        """
        return self._compared(id, self.joined(id))

    def joined(self, id: str) -> Routes:
        """The canonical routes of one sample, not compared. Raises the errors of `routes`."""
        row = self.rows[id]
        T = row["rows_total"]
        columns = {layer: i for i, layer in enumerate(self.geometry.layers)}
        # Check what covers the rows before allocating: a wrong T may be huge.
        covered = [
            (part, _covering(part, id, row, located["segments"]))
            for located in row["routes"] or []
            if (part := self.parts.get(located["file"])) is not None
        ]
        missing = set(columns)
        for part, _ in covered:
            if not missing.issuperset(part.sets):
                raise TraceError(f"{part.key}: sample {id}: another file has its layers too")
            missing -= set(part.sets)
        if missing or not covered:
            raise TraceError(f"sample {id}: no routes of layers {sorted(missing)}")
        # As in the file, a layer's rows are contiguous, so they are copied in one piece.
        sets_LTK = np.empty((len(columns), T, self.geometry.topk), self.geometry.dtype)
        valid_T = np.empty(T, np.bool_)
        for number, (part, covering) in enumerate(covered):
            here_T = np.empty(T, np.bool_)
            for to, rows in covering:
                here_T[to] = part.valid_N[rows]
                for layer, sets_NK in part.sets.items():
                    sets_LTK[columns[layer], to] = sets_NK[rows]
            if number and not np.array_equal(valid_T, here_T):
                raise TraceError(f"{part.key}: sample {id}: valid rows differ between its files")
            valid_T = here_T
        if not valid_T.all():
            sets_LTK[:, ~valid_T] = np.arange(self.geometry.topk)
        return Routes(sets_LTK.swapaxes(0, 1), valid_T)

    def _compared(self, id: str, routes: Routes) -> Routes:
        expected = self.rows[id]
        if expected["routes_digest"] is None:
            return routes  # a join of the trainer's files: the whole has no digest yet
        if routes.valid_T.sum() != expected["rows_valid"]:
            raise TraceError(
                f"sample {id}: {routes.valid_T.sum()} valid rows, its manifest says "
                f"{expected['rows_valid']}"
            )
        if self.whole:
            found = digest_of_canonical(routes, self.geometry)
            if found != expected["routes_digest"]:
                raise TraceError(
                    f"sample {id}: its routes have digest {found[:16]}..., the manifest says "
                    f"{str(expected['routes_digest'])[:16]}...; remake the step"
                )
        return routes


def read_part(
    store: Store,
    file: TraceFile,
    geometry: Geometry,
    layers: Sequence[int],
    segments: Sequence[int],
    footer: bytes | None = None,
) -> Part:
    """Fetch and decode some segments (rows of the file) of a routes file, in some of its layers.

    `geometry` is the file's own; `footer` is that of `read_table`. Raises TraceError, naming the
    file; ObjectMissingError; CorruptObjectError.
    """
    wanted = Geometry(geometry.experts, geometry.topk, tuple(layers))
    table, at = read_rows(store, file, segments, routes_schema(wanted), geometry, footer)
    places = pa.array([at[row] for row in segments], pa.int64())
    if places != pa.array(range(len(table)), pa.int64()):
        table = table.take(places)
    table = table.combine_chunks()
    owners, starts, tokens, validity = (table[name].to_pylist() for name in SEGMENT.names)
    if any(n < 0 for n in tokens):
        raise TraceError(f"{file.data.key}: a segment of {min(tokens)} tokens")
    ends = np.cumsum([0, *tokens]).tolist()
    found = {
        row: Segment(owners[i], starts[i], slice(ends[i], ends[i + 1]))
        for i, row in enumerate(segments)
    }
    sets = {}
    for layer in layers:
        coded = _values(table[layer_column(layer)])
        try:
            sets[layer] = decode_segments(coded, tokens, geometry.topk, geometry.experts)
        except TraceError as error:
            raise TraceError(f"{file.data.key}: layer {layer}: {error}") from error
    valid = [_bits(file, *pair) for pair in zip(validity, tokens, strict=True)]
    return Part(file.data.key, found, sets, np.concatenate([np.empty(0, np.bool_), *valid]))


def read_rows(
    store: Store,
    file: TraceFile,
    rows: Sequence[int],
    schema: pa.Schema,
    geometry: Geometry | None,
    footer: bytes | None = None,
) -> tuple[pa.Table, dict[int, int]]:
    """Read the row groups that hold some rows of a file; also return each row's index in the table.

    Raises TraceError for a row beyond the file's end, and the errors of `read_table`.
    """
    firsts = np.cumsum([0, *(group.rows for group in file.row_groups)])
    if len(rows) and not 0 <= min(rows) <= max(rows) < file.rows:
        raise TraceError(f"{file.data.key}: row {max(rows)} of a file of {file.rows}")
    group_of = np.searchsorted(firsts, rows, side="right") - 1
    groups = np.unique(group_of)
    table = read_table(store, file, schema, groups.tolist(), geometry, footer)
    sizes = np.diff(firsts)[groups]
    begins = dict(zip(groups.tolist(), (np.cumsum(sizes) - sizes).tolist(), strict=True))
    at = {r: begins[g] + r - int(firsts[g]) for r, g in zip(rows, group_of.tolist(), strict=True)}
    return table, at


def _covering(
    part: Part, id: str, row: Mapping[str, Any], places: Sequence[Mapping[str, int]]
) -> list[tuple[slice, slice]]:
    """Pair a sample's positions with their rows in a part; they must be 0..S-2, each once."""
    covering = []
    position = 0
    for place in places:
        segment, tokens = part.segments[place["row"]], place["tokens"]
        if segment.owner not in (id, row["group"], row["branch_of"] or id):
            raise TraceError(f"{part.key}: sample {id}: a segment of {segment.owner}")
        if segment.token_start != position:
            raise TraceError(
                f"{part.key}: sample {id}: a segment from position {segment.token_start}, "
                f"expected from {position}"
            )
        start, length = segment.rows.start, segment.rows.stop - segment.rows.start
        if not 0 < tokens <= length:
            raise TraceError(f"{part.key}: sample {id}: {tokens} tokens of a segment of {length}")
        covering.append((slice(position, position + tokens), slice(start, start + tokens)))
        position += tokens
    if position != row["rows_total"]:
        raise TraceError(
            f"{part.key}: sample {id}: {position} rows of routes, expected {row['rows_total']}: "
            "one per token but the last"
        )
    return covering


def _values(column: pa.ChunkedArray) -> list[memoryview]:
    """The values of a binary column without nulls, as views."""
    values = []
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int32, len(chunk) + 1, 4 * chunk.offset).tolist()
        view = memoryview(data) if data is not None else memoryview(b"")
        values += [view[i:j] for i, j in itertools.pairwise(ends)]
    return values


def _bits(file: TraceFile, bitmap: bytes | None, tokens: int) -> npt.NDArray[np.bool_]:
    if bitmap is None:
        return np.ones(tokens, np.bool_)
    if len(bitmap) != (tokens + 7) // 8:
        raise TraceError(f"{file.data.key}: {len(bitmap)} bytes of validity for {tokens} tokens")
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=tokens, bitorder="little")
    return bits.astype(np.bool_)
