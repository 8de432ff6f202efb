"""Routes of samples, joined from the segments that hold them.

Nothing is trusted: segments name their owner and position, coded sets are bounded, and the rows of
a sample must be exactly its positions, once in every layer. They may lie in several files: layers,
where pipeline stages recorded them; positions, where context-parallel ranks did.

Letters: T rows of a sample, L wanted layers, K experts per row, N rows of several segments.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
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
    whole: bool
    """Whether these are all layers of the file, so that digests of its samples can be compared."""


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
        """The canonical routes of one sample, of which only the parts are compared with digests.

        Raises the errors of `routes`.
        """
        row = self.rows[id]
        T = row["rows_total"]
        held = self._held(id, row)
        columns = {layer: i for i, layer in enumerate(self.geometry.layers)}
        by_holders = _by_holders(columns, held)
        # Check what covers the rows before allocating: a wrong T may be huge.
        for layers, parts in by_holders.items():
            _check_covered(id, layers, parts, T)
        # As in the file, a layer's rows are contiguous, so they are copied in one piece.
        sets_LTK = np.empty((len(self.geometry.layers), T, self.geometry.topk), self.geometry.dtype)
        valid_T = np.empty(T, np.bool_)
        for number, (layers, parts) in enumerate(by_holders.items()):
            here_T = np.empty(T, np.bool_)
            for part in parts:
                for to, rows in part.places:
                    here_T[to] = part.part.valid_N[rows]
                    for layer in layers:
                        sets_LTK[columns[layer], to] = part.part.sets[layer][rows]
            if number and not np.array_equal(valid_T, here_T):
                raise TraceError(
                    f"{parts[0].part.key}: sample {id}: valid rows differ between its files"
                )
            valid_T = here_T
        if not valid_T.all():
            sets_LTK[:, ~valid_T] = np.arange(self.geometry.topk)
        for part in held:
            self._compare_part(id, part, columns, sets_LTK, valid_T)
        return Routes(sets_LTK.swapaxes(0, 1), valid_T)

    def _held(self, id: str, row: Mapping[str, Any]) -> list["_Held"]:
        """What the fetched parts hold of a sample, part by part."""
        located = row["routes"] or []
        digests = row.get("part_digests") or [None] * len(located)
        if len(digests) != len(located):
            raise TraceError(f"sample {id}: {len(digests)} part_digests of {len(located)} parts")
        return [
            _Held(part, _places(part, id, row, here["segments"]), digest)
            for here, digest in zip(located, digests, strict=True)
            if (part := self.parts.get(here["file"])) is not None
        ]

    def _compare_part(
        self,
        id: str,
        held: "_Held",
        columns: Mapping[int, int],
        sets_LTK: npt.NDArray[Any],
        valid_T: npt.NDArray[np.bool_],
    ) -> None:
        """Compare the digest of a part of which every layer and row was read."""
        part = held.part
        if held.digest is None or not part.whole:
            return
        layers = tuple(sorted(part.sets))
        positions = [np.arange(to.start, to.stop) for to, _ in held.places]
        at_T = np.concatenate([np.empty(0, np.int64), *positions])
        at_L = np.array([columns[layer] for layer in layers])
        routes = Routes(sets_LTK[at_L[:, None], at_T].swapaxes(0, 1), valid_T[at_T])
        geometry = Geometry(self.geometry.experts, self.geometry.topk, layers)
        found = digest_of_canonical(routes, geometry)
        if found != held.digest:
            raise TraceError(
                f"{part.key}: sample {id}: its routes of layers {list(layers)} have digest "
                f"{found[:16]}..., expected {held.digest[:16]}...; remake the step"
            )

    def _compared(self, id: str, routes: Routes) -> Routes:
        expected = self.rows[id]
        valid = int(routes.valid_T.sum())
        if expected["rows_valid"] not in (None, valid):
            raise TraceError(
                f"sample {id}: {valid} valid rows, its manifest says {expected['rows_valid']}"
            )
        # A join of the trainer's files has digests of its parts; the whole has none.
        if self.whole and expected["routes_digest"] is not None:
            found = digest_of_canonical(routes, self.geometry)
            if found != expected["routes_digest"]:
                raise TraceError(
                    f"sample {id}: its routes have digest {found[:16]}..., the manifest says "
                    f"{str(expected['routes_digest'])[:16]}...; remake the step"
                )
        return routes


@dataclass(frozen=True)
class _Held:
    """What a part holds of a sample."""

    part: Part
    places: Sequence[tuple[slice, slice]]
    """Positions of the sample, ascending, and the rows of the part that hold them."""
    digest: str | None
    """The routes digest of all that the part's file holds of the sample, if it is known."""


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
    valid_N = np.concatenate([np.empty(0, np.bool_), *valid])
    whole = set(layers) == set(geometry.layers)
    return Part(file.data.key, found, sets, valid_N, whole)


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


def _places(
    part: Part, id: str, row: Mapping[str, Any], located: Sequence[Mapping[str, int]]
) -> list[tuple[slice, slice]]:
    """Pair positions of a sample, which must ascend, with their rows in a part."""
    places = []
    position = 0
    for place in located:
        segment, tokens = part.segments[place["row"]], place["tokens"]
        if segment.owner not in (id, row["group"], row["branch_of"] or id):
            raise TraceError(f"{part.key}: sample {id}: a segment of {segment.owner}")
        if segment.token_start < position:
            raise TraceError(
                f"{part.key}: sample {id}: a segment from position {segment.token_start}, "
                f"expected from {position} or later"
            )
        start, length = segment.rows.start, segment.rows.stop - segment.rows.start
        if not 0 < tokens <= length:
            raise TraceError(f"{part.key}: sample {id}: {tokens} tokens of a segment of {length}")
        position = segment.token_start + tokens
        places.append((slice(segment.token_start, position), slice(start, start + tokens)))
    return places


def _by_holders(layers: Iterable[int], held: Sequence[_Held]) -> dict[tuple[int, ...], list[_Held]]:
    """Layers with the parts that hold their rows: usually one, more where rows were cut."""
    if len(held) == 1 and held[0].part.sets.keys() == set(layers):
        return {tuple(layers): list(held)}
    by_parts: dict[tuple[int, ...], list[int]] = {}
    for layer in layers:
        holders = tuple(i for i, part in enumerate(held) if layer in part.part.sets)
        by_parts.setdefault(holders, []).append(layer)
    return {tuple(mine): [held[i] for i in holders] for holders, mine in by_parts.items()}


def _check_covered(id: str, layers: Sequence[int], parts: Sequence[_Held], rows: int) -> None:
    """Raise TraceError unless the parts together hold each of a sample's positions once."""
    if not parts:
        raise TraceError(f"sample {id}: no routes of layers {sorted(layers)}")
    positions = sorted(
        (to.start, to.stop, part.part.key) for part in parts for to, _ in part.places
    )
    position = 0
    for start, stop, key in positions:
        if start != position:
            problem = "is there twice" if start < position else "is missing"
            raise TraceError(
                f"{key}: sample {id}: position {min(start, position)} {problem} in layers "
                f"{sorted(layers)}"
            )
        position = stop
    if position != rows:
        raise TraceError(
            f"{parts[-1].part.key}: sample {id}: {position} rows of routes, expected {rows}: "
            "one per token but the last"
        )


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
