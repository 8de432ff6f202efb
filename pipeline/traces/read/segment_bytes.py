"""The coded bytes of segments in opened row groups, and their decoding.

Dimensions: N is the number of rows in several segments, and K the number of experts per row.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.model.geometry import Geometry
from pipeline.traces.format.chunks import OpenedGroups
from pipeline.traces.format.codec import (
    decode_rows,
    has_gaps,
    in_planes,
    row_bytes,
    stored_lengths,
)
from pipeline.traces.format.planes import decode_planes
from pipeline.traces.format.schema import layer_column, routes_schema
from pipeline.traces.format.types import TraceError

LayerBytes: TypeAlias = list[tuple[slice | int, npt.NDArray[np.uint8]]]
"""The coded bytes of a layer, in pieces. If segments are coded separately, each piece consists of a
slice of the list of selected segments, and the bytes of these segments. If row groups are coded as
a whole, each piece consists of the index of an opened row group, and the bytes of its rows."""


class _Run(NamedTuple):
    """Adjacent selected segments in a row group."""

    group: int
    """Index of the row group among the opened ones."""
    segments: slice
    """The segments in the list of selected segments."""
    rows: slice
    """The segments' rows among the rows of the row group."""


class SegmentBytes:
    """Finds and decodes the coded bytes of selected segments.

    Our writer stores an uncompressed column as one page that contains lengths, followed by coded
    sets. Bytes in this form are used without a copy; a Parquet library decodes every other form.

    `tokens` is the token count of each segment in the opened row groups, and `rows` the number of
    segments in each row group. `wanted` lists the indices of the selected segments, and `geometry`
    is the file's geometry.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        rows: Sequence[int],
        wanted: Sequence[int],
        geometry: Geometry,
    ) -> None:
        self._geometry, self._tokens, self._wanted = geometry, tokens, wanted
        self._width = row_bytes(geometry.topk, geometry.experts)
        self._firsts = list(itertools.accumulate(rows, initial=0))
        ends = list(itertools.accumulate(tokens, initial=0))
        self._ends = list(itertools.accumulate((tokens[i] for i in wanted), initial=0))
        """Where each selected segment begins in the decoded array, and where the last one ends."""
        groups = np.searchsorted(self._firsts, wanted, side="right") - 1
        self._runs: list[_Run] = []
        self._runs_of: dict[int, list[_Run]] = {}
        """Runs, keyed by row group."""
        begin = 0
        for i in range(1, len(wanted) + 1):
            more = i < len(wanted) and groups[i] == groups[begin]
            if not (more and wanted[i] == wanted[i - 1] + 1):
                group = int(groups[begin])
                first = ends[self._firsts[group]]
                place = slice(ends[wanted[begin]] - first, ends[wanted[i - 1] + 1] - first)
                run = _Run(group, slice(begin, i), place)
                self._runs.append(run)
                self._runs_of.setdefault(group, []).append(run)
                begin = i
        self._rows = [ends[j] - ends[i] for i, j in itertools.pairwise(self._firsts)]
        """The number of rows in each row group."""
        self._heads: list[bytes | None] = [None] * len(rows)

    def of_layers(self, opened: OpenedGroups, layers: Sequence[int]) -> list[LayerBytes]:
        """Return the coded bytes of each layer. Raises TraceError if a length is wrong."""
        schema = layer_columns(routes_schema(self._geometry), layers)
        if in_planes(opened.coding):
            table = opened.table(schema)
            return [
                self._of_row_groups(opened, table[layer_column(layer)], layer) for layer in layers
            ]
        found: list[LayerBytes] = []
        for layer in layers:
            plain = self._plain(opened, layer)
            if plain is None:
                break
            found.append(plain)
        if len(found) == len(layers):
            return found
        table = select_rows(opened.table(schema), self._wanted)
        tokens = [self._tokens[i] for i in self._wanted]
        key = opened.file.data.key
        return [
            _coded(key, table[layer_column(layer)], layer, tokens, self._geometry)
            for layer in layers
        ]

    def decode(self, coded: LayerBytes, sets_NK: npt.NDArray[Any], stored: str | None) -> None:
        """Decode a layer of the selected segments.

        Args:
            coded: The layer's coded bytes.
            sets_NK: The array to fill with the rows of all selected segments, in order.
            stored: The name of the coding.

        Raises:
            TraceError: The coding is unknown, or the bytes are invalid.
        """
        experts = self._geometry.experts
        gaps = has_gaps(stored, experts)
        for place, data in coded:
            if isinstance(place, int):
                self._decode_group(place, data, sets_NK, gaps=gaps)
            else:
                tokens = [self._tokens[i] for i in self._wanted[place]]
                decode_rows(self._part(sets_NK, place), data, tokens, experts, stored)

    def _part(self, sets_NK: npt.NDArray[Any], segments: slice) -> npt.NDArray[Any]:
        return sets_NK[self._ends[segments.start] : self._ends[segments.stop]]

    def _decode_group(
        self, group: int, data: npt.NDArray[np.uint8], sets_NK: npt.NDArray[Any], *, gaps: bool
    ) -> None:
        experts, runs = self._geometry.experts, self._runs_of.get(group, [])
        parts = [self._part(sets_NK, run.segments) for run in runs]
        if parts and len(parts[0]) == self._rows[group]:  # every segment is selected, in order
            decode_planes(data, parts[0], experts, gaps=gaps)
            return
        whole_NK = np.empty((self._rows[group], sets_NK.shape[1]), sets_NK.dtype)
        decode_planes(data, whole_NK, experts, gaps=gaps)
        for run, part_NK in zip(runs, parts, strict=True):
            part_NK[:] = whole_NK[run.rows]

    def _of_row_groups(
        self, opened: OpenedGroups, column: pa.ChunkedArray, layer: int
    ) -> LayerBytes:
        """Return the bytes of each row group, which must be in the group's first segment."""
        found: LayerBytes = []
        for i, (begin, end) in enumerate(itertools.pairwise(self._firsts)):
            if begin == end:
                continue
            data = np.frombuffer(column[begin].as_buffer(), np.uint8)
            where = f"{opened.file.data.key}: layer {layer}, row group {opened.row_groups[i]}"
            if pc.sum(pc.binary_length(column.slice(begin, end - begin))).as_py() != len(data):
                raise TraceError(f"{where}: coded bytes after the first segment")
            if len(data) != self._width * self._rows[i]:
                raise TraceError(
                    f"{where}: {len(data)} coded bytes, expected {self._rows[i]} rows of "
                    f"{self._width}"
                )
            found.append((i, data))
        return found

    def _plain(self, opened: OpenedGroups, layer: int) -> LayerBytes | None:
        """Return the coded bytes of a layer; None if a page is not in our writer's form."""
        found: list[npt.NDArray[np.uint8]] = []
        for i, group in enumerate(opened.row_groups):
            page = opened.page_bytes(group, layer_column(layer))
            if page is None or (coded := self._without_lengths(page, i)) is None:
                return None
            found.append(coded)
        width = self._width
        return [
            (run.segments, found[run.group][width * run.rows.start : width * run.rows.stop])
            for run in self._runs
        ]

    def _without_lengths(self, page: memoryview, i: int) -> npt.NDArray[np.uint8] | None:
        size = self._width * self._rows[i]
        tokens = self._tokens[self._firsts[i] : self._firsts[i + 1]]
        if size > len(page):
            return None  # token counts may be wrong, and therefore huge
        head = self._heads[i]
        if head is None:
            head = self._heads[i] = stored_lengths([self._width * n for n in tokens])
        if len(page) != len(head) + size or page[: len(head)] != head:
            return None
        return np.frombuffer(page, np.uint8, offset=len(head))


def layer_columns(schema: pa.Schema, layers: Sequence[int]) -> pa.Schema:
    """Return a schema that contains only the columns of the given layers."""
    return pa.schema([schema.field(layer_column(layer)) for layer in layers])


def select_rows(table: pa.Table, places: Sequence[int]) -> pa.Table:
    """Return the rows of a table at the given indices."""
    if places == [*range(len(table))]:
        return table
    return table.take(pa.array(places, pa.int64()))


def _coded(
    key: str, column: pa.ChunkedArray, layer: int, tokens: Sequence[int], geometry: Geometry
) -> LayerBytes:
    """Return the coded bytes of a layer, in one piece for each chunk of the layer's column.

    Nothing is copied. Raises a TraceError that names the file if a segment has the wrong length.
    """
    width = row_bytes(geometry.topk, geometry.experts)
    found: LayerBytes = []
    at = 0
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        starts = np.frombuffer(offsets, np.int32, len(chunk) + 1, 4 * chunk.offset)
        segments = slice(at, at + len(chunk))
        lengths, expected = np.diff(starts), width * np.array(tokens[segments], np.int64)
        if not np.array_equal(lengths, expected):
            bad = int((lengths != expected).argmax())
            raise TraceError(
                f"{key}: layer {layer}: {lengths[bad]} coded bytes, expected "
                f"{tokens[at + bad]} rows of {width}"
            )
        buffer = b"" if data is None else data
        begin, end = (int(starts[0]), int(starts[-1])) if len(chunk) else (0, 0)
        found.append((segments, np.frombuffer(buffer, np.uint8)[begin:end]))
        at += len(chunk)
    return found
