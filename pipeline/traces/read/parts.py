"""Segments of a routes file, fetched and decoded.

Letters: L wanted layers, K experts per row, N rows of several segments.
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
from pipeline.threads import in_threads, thread_count
from pipeline.traces.format.chunks import TraceFile, read_footer, read_table
from pipeline.traces.format.codec import decode_rows, row_bytes
from pipeline.traces.format.schema import SEGMENT, layer_column, routes_schema
from pipeline.traces.format.types import TraceError

_MUCH = 1 << 20
"""Size of a file above which several threads read it."""


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
    layers: tuple[int, ...]
    """Model indices of the L layers that were read."""
    sets_LNK: npt.NDArray[Any]
    valid_N: npt.NDArray[np.bool_]
    whole: bool
    """Whether these are all layers of the file, so that digests of its samples can be compared."""


def read_part(
    store: Store,
    file: TraceFile,
    geometry: Geometry,
    layers: Sequence[int],
    segments: Sequence[int],
    footer: bytes | None = None,
) -> Part:
    """Fetch and decode some segments (rows of the file) of a routes file, in some of its layers.

    `geometry` is the file's own; `footer` is that of `read_table`. The layers of a large file are
    read by several threads. Raises TraceError, naming the file; ObjectMissingError;
    CorruptObjectError.
    """
    threads = thread_count() if file.data.size > _MUCH else 1
    cuts = np.linspace(0, len(layers), min(threads, max(1, len(layers))) + 1).astype(int).tolist()
    pieces = [layers[i:j] for i, j in itertools.pairwise(cuts)]
    footer = footer if len(pieces) == 1 else footer or read_footer(store, file)

    def read_piece(piece: Sequence[int]) -> pa.Table:
        schema = routes_schema(Geometry(geometry.experts, geometry.topk, tuple(piece)))
        if piece is not pieces[0]:
            schema = pa.schema([schema.field(layer_column(layer)) for layer in piece])
        table, at = read_rows(store, file, segments, schema, geometry, footer)
        places = pa.array([at[row] for row in segments], pa.int64())
        return table if places == pa.array(range(len(table)), pa.int64()) else table.take(places)

    tables = in_threads(read_piece, pieces)
    owners, starts, tokens, validity = (tables[0][name].to_pylist() for name in SEGMENT.names)
    if any(n < 0 for n in tokens):
        raise TraceError(f"{file.data.key}: a segment of {min(tokens)} tokens")
    ends = np.cumsum([0, *tokens]).tolist()
    found = {
        row: Segment(owners[i], starts[i], slice(ends[i], ends[i + 1]))
        for i, row in enumerate(segments)
    }
    coded = [
        _coded(file, table[layer_column(layer)], layer, tokens, geometry)
        for piece, table in zip(pieces, tables, strict=True)
        for layer in piece
    ]
    sets_LNK = np.empty((len(layers), ends[-1], geometry.topk), geometry.dtype)

    def decode(columns: Iterable[int]) -> None:
        for i in columns:
            try:
                for rows, data in coded[i]:
                    of_chunk = sets_LNK[i, ends[rows.start] : ends[rows.stop]]
                    decode_rows(of_chunk, data, tokens[rows], geometry.experts)
            except TraceError as error:
                raise TraceError(f"{file.data.key}: layer {layers[i]}: {error}") from error

    in_threads(decode, map(range, cuts, cuts[1:]))
    valid_N = np.ones(ends[-1], np.bool_)
    for i, bitmap in enumerate(validity):
        if bitmap is not None:
            valid_N[ends[i] : ends[i + 1]] = _bits(file, bitmap, tokens[i])
    whole = set(layers) == set(geometry.layers)
    return Part(file.data.key, found, tuple(layers), sets_LNK, valid_N, whole)


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


def _coded(
    file: TraceFile, column: pa.ChunkedArray, layer: int, tokens: Sequence[int], geometry: Geometry
) -> list[tuple[slice, npt.NDArray[np.uint8]]]:
    """The coded bytes of a layer by chunk of its column, with the segments that a chunk holds.

    Nothing is copied. Raises TraceError, naming the file, for a segment of another length.
    """
    width = row_bytes(geometry.topk, geometry.experts)
    found, at = [], 0
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        starts = np.frombuffer(offsets, np.int32, len(chunk) + 1, 4 * chunk.offset)
        segments = slice(at, at + len(chunk))
        lengths, expected = np.diff(starts), width * np.array(tokens[segments], np.int64)
        if not np.array_equal(lengths, expected):
            bad = int((lengths != expected).argmax())
            raise TraceError(
                f"{file.data.key}: layer {layer}: {lengths[bad]} coded bytes, expected "
                f"{tokens[at + bad]} rows of {width}"
            )
        buffer = b"" if data is None else data
        begin, end = (int(starts[0]), int(starts[-1])) if len(chunk) else (0, 0)
        found.append((segments, np.frombuffer(buffer, np.uint8)[begin:end]))
        at += len(chunk)
    return found


def _bits(file: TraceFile, bitmap: bytes, tokens: int) -> npt.NDArray[np.bool_]:
    if len(bitmap) != (tokens + 7) // 8:
        raise TraceError(f"{file.data.key}: {len(bitmap)} bytes of validity for {tokens} tokens")
    if tokens % 8 and bitmap[-1] >> tokens % 8:
        raise TraceError(f"{file.data.key}: validity of {tokens} tokens with unused bits set")
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), count=tokens, bitorder="little")
    return bits.astype(np.bool_)
