"""The coded bytes of segments in opened row groups."""

import itertools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.model.geometry import Geometry
from pipeline.traces.format.chunks import OpenedGroups
from pipeline.traces.format.codec import row_bytes, stored_lengths
from pipeline.traces.format.schema import layer_column, routes_schema
from pipeline.traces.format.types import TraceError

LayerBytes: TypeAlias = list[tuple[slice, npt.NDArray[np.uint8]]]
"""The coded bytes of a layer, in pieces. Each piece consists of a slice of the list of selected
segments, and the bytes of these segments."""


class SegmentBytes:
    """Finds the coded bytes of selected segments.

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
        width = row_bytes(geometry.topk, geometry.experts)
        self._geometry, self._tokens, self._wanted = geometry, tokens, wanted
        self._firsts = list(itertools.accumulate(rows, initial=0))
        self._lengths = [width * n for n in tokens]
        ends = list(itertools.accumulate(self._lengths, initial=0))
        groups = np.searchsorted(self._firsts, wanted, side="right") - 1
        self._runs: list[tuple[int, slice, slice]] = []
        """Runs of adjacent selected segments in a row group. A run consists of the group's index, a
        slice of the list of selected segments, and a slice of the group's coded bytes."""
        begin = 0
        for i in range(1, len(wanted) + 1):
            at = i < len(wanted) and groups[i] == groups[begin] and wanted[i] == wanted[i - 1] + 1
            if not at:
                group = int(groups[begin])
                first = ends[self._firsts[group]]
                place = slice(ends[wanted[begin]] - first, ends[wanted[i - 1] + 1] - first)
                self._runs.append((group, slice(begin, i), place))
                begin = i
        self._sizes = [ends[j] - ends[i] for i, j in itertools.pairwise(self._firsts)]
        self._heads: list[bytes | None] = [None] * len(rows)

    def of_layers(self, opened: OpenedGroups, layers: Sequence[int]) -> list[LayerBytes]:
        """Return the coded bytes of each layer. Raises TraceError if a length is wrong."""
        found = []
        for layer in layers:
            plain = self._plain(opened, layer)
            if plain is None:
                break
            found.append(plain)
        if len(found) == len(layers):
            return found
        schema = layer_columns(routes_schema(self._geometry), layers)
        table = select_rows(opened.table(schema), self._wanted)
        tokens = [self._tokens[i] for i in self._wanted]
        key = opened.file.data.key
        return [
            _coded(key, table[layer_column(layer)], layer, tokens, self._geometry)
            for layer in layers
        ]

    def _plain(self, opened: OpenedGroups, layer: int) -> LayerBytes | None:
        """Return the coded bytes of a layer; None if a page is not in our writer's form."""
        found = []
        for i, group in enumerate(opened.row_groups):
            page = opened.page_bytes(group, layer_column(layer))
            if page is None or (coded := self._without_lengths(page, i)) is None:
                return None
            found.append(coded)
        return [(segments, found[group][place]) for group, segments, place in self._runs]

    def _without_lengths(self, page: memoryview, i: int) -> npt.NDArray[np.uint8] | None:
        size = self._sizes[i]
        lengths = self._lengths[self._firsts[i] : self._firsts[i + 1]]
        if size > len(page) or min(lengths, default=0) < 0:
            return None  # token counts may be wrong, and therefore huge
        head = self._heads[i] = self._heads[i] or stored_lengths(lengths)
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
    found, at = [], 0
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
