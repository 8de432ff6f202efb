"""Fetching and decoding segments of a routes file.

Dimensions: L is the number of selected layers, K the number of experts per row, and N the number of
rows in several segments.
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
from pipeline.traces.format.chunks import (
    OpenedGroups,
    TraceFile,
    open_groups,
    read_footer,
    read_table,
)
from pipeline.traces.format.digests import valid_rows
from pipeline.traces.format.schema import SEGMENT, routes_schema
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.segment_bytes import SegmentBytes, layer_columns, select_rows

_MUCH = 1 << 20
"""The size in bytes above which several threads read a file."""


@dataclass(frozen=True)
class Segment:
    """A decoded segment."""

    owner: str
    token_start: int
    rows: slice
    """The segment's rows in the arrays of its part."""


@dataclass(frozen=True)
class Part:
    """Decoded segments of one routes file."""

    key: str
    segments: Mapping[int, Segment]
    """Segments, keyed by their row in the file."""
    layers: tuple[int, ...]
    """Model indices of the L layers that were read."""
    sets_LNK: npt.NDArray[Any]
    valid_N: npt.NDArray[np.bool_]
    whole: bool
    """Whether all layers of the file were read. Only then can routes be compared with their
    digests."""


def read_part(
    store: Store,
    file: TraceFile,
    geometry: Geometry,
    layers: Sequence[int],
    segments: Sequence[int],
    footer: bytes | None = None,
) -> Part:
    """Fetch and decode some layers of some segments of a routes file.

    Several threads read the layers of a large file.

    Args:
        store: The store that contains the file.
        file: The file as described in its commit.
        geometry: The file's geometry.
        layers: Model indices of the layers to read.
        segments: Rows of the file, one per segment.
        footer: Checked footer from `read_footer`, for repeated reads; None fetches the footer.

    Raises:
        ObjectMissingError: The file is not in the store.
        CorruptObjectError: The file's size or a digest differs from the commit.
        TraceError: The file's content is invalid; the message names the file.
    """
    threads = thread_count() if file.data.size > _MUCH else 1
    cuts = np.linspace(0, len(layers), min(threads, max(1, len(layers))) + 1).astype(int).tolist()
    pieces = [layers[i:j] for i, j in itertools.pairwise(cuts)]
    footer = footer if len(pieces) == 1 else footer or read_footer(store, file)
    groups, at = _groups_of(file, segments)
    places = [at[row] for row in segments]

    def open_piece(piece: Sequence[int]) -> OpenedGroups:
        schema = routes_schema(Geometry(geometry.experts, geometry.topk, tuple(piece)))
        if piece is not pieces[0]:
            schema = layer_columns(schema, piece)
        return open_groups(store, file, schema, groups, geometry, footer)

    opened = in_threads(open_piece, pieces)
    every = opened[0].table(SEGMENT)
    table = select_rows(every, places)
    owners, starts, tokens, validity = (table[name].to_pylist() for name in SEGMENT.names)
    every_tokens = every["tokens"].to_pylist()
    if any(n < 1 for n in every_tokens):
        raise TraceError(
            f"{file.data.key}: a segment of {min(every_tokens)} tokens, expected at least 1"
        )
    ends = np.cumsum([0, *tokens]).tolist()
    found = {
        row: Segment(owners[i], starts[i], slice(ends[i], ends[i + 1]))
        for i, row in enumerate(segments)
    }
    rows = [file.row_groups[g].rows for g in groups]
    of_segments = SegmentBytes(every_tokens, rows, places, geometry)
    by_piece = in_threads(lambda one: of_segments.of_layers(*one), zip(opened, pieces, strict=True))
    coded = list(itertools.chain(*by_piece))
    # Allocate only after comparing the lengths, because a wrong number of tokens may be huge.
    sets_LNK = np.empty((len(layers), ends[-1], geometry.topk), geometry.dtype)

    def decode(columns: Iterable[int]) -> None:
        for i in columns:
            try:
                of_segments.decode(coded[i], sets_LNK[i], opened[0].coding)
            except TraceError as error:
                raise TraceError(f"{file.data.key}: layer {layers[i]}: {error}") from error

    in_threads(decode, map(range, cuts, cuts[1:]))
    valid_N = _valid(file, validity, tokens)
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
    """Read the row groups that contain the given rows of a file.

    Args:
        store: The store that contains the file.
        file: The file as described in its commit.
        rows: Rows of the file.
        schema: Columns to read.
        geometry: Geometry that a routes file must have; None skips this check.
        footer: Checked footer from `read_footer`, for repeated reads; None fetches the footer.

    Returns:
        The table of these row groups, and each row's index in the table.

    Raises:
        TraceError: A row is beyond the file's end, or the file's content is invalid (`read_table`).
    """
    groups, at = _groups_of(file, rows)
    return read_table(store, file, schema, groups, geometry, footer), at


def _groups_of(file: TraceFile, rows: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Return the row groups that contain the given rows, and each row's index in these groups."""
    firsts, group_of = file.first_rows, file.groups_of(rows)
    groups = np.unique(group_of)
    sizes = np.diff(firsts)[groups]
    begins = dict(zip(groups.tolist(), (np.cumsum(sizes) - sizes).tolist(), strict=True))
    at = {r: begins[g] + r - int(firsts[g]) for r, g in zip(rows, group_of.tolist(), strict=True)}
    return groups.tolist(), at


def _valid(
    file: TraceFile, validity: Sequence[bytes | None], tokens: Sequence[int]
) -> npt.NDArray[np.bool_]:
    valid_N, end = np.ones(sum(tokens), np.bool_), 0
    for bitmap, n in zip(validity, tokens, strict=True):
        end += n
        if bitmap is not None:
            valid_N[end - n : end] = valid_rows(bitmap, n, file.data.key)
    return valid_N
