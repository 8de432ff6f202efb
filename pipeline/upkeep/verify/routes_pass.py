"""The part of `verify` that reads a shard's routes file once: its bytes, ranges and rows.

Row groups are read in the order of the file, so that the file's digest is computed in the same
pass. They are decoded one window at a time. A window consists of neighbouring row groups, which
together contain complete samples.

Dimensions: N is the number of rows in a window's segments.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.model.geometry import Geometry
from pipeline.run.commit import CorruptObjectError
from pipeline.store import Store
from pipeline.traces.format.chunks import Range, TraceFile, read_footer, read_table
from pipeline.traces.format.schema import SEGMENT, routes_schema
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.parts import read_part
from pipeline.traces.read.slices import Slices
from pipeline.upkeep.problems import Report
from pipeline.upkeep.verify.contents import check_size, refuse_whole, verify_file
from pipeline.upkeep.verify.joined_rows import check_unknown_rows

_WINDOW_BYTES = 32 << 20
"""Size in bytes of the decoded sets after which a window ends at the next possible row group."""
_MOST_BYTES = 128 << 20
"""Size in bytes of the decoded sets after which a window always ends. Samples that are split there
are read again, each separately."""
_ROW = ["id", "group", "branch_of", "prompt_length", "rows_total", "rows_valid", "routes_digest"]


@dataclass(frozen=True)
class _Window:
    """Neighbouring row groups."""

    groups: range
    samples: npt.NDArray[np.int64]
    """Row numbers of the samples whose routes are entirely in these row groups."""


class RoutesPass:
    """Checks a routes file against the samples of its shard.

    `rows` contains the columns `samples_pass.ROWS` of the shard's samples.
    """

    def __init__(
        self, store: Store, file: TraceFile, geometry: Geometry, rows: pa.Table, report: Report
    ) -> None:
        self._store, self._file, self._geometry = store, file, geometry
        self._rows, self._report = rows, report
        self._key = file.data.key

    def run(self, commit: str) -> None:
        """Report all problems with the file; `commit` is the key of the commit that lists it."""
        if self._report.seen.get(self._key) == self._file.data:
            return
        with self._report.noting(self._key):
            check_size(self._store, self._file.data, commit)
            before = self._report.found
            try:
                footer = read_footer(self._store, self._file)
                segments = read_table(self._store, self._file, SEGMENT, footer=footer)
            except TraceError:
                verify_file(self._store, self._file, self._report, commit)
                raise
            except CorruptObjectError as error:
                verify_file(self._store, self._file, self._report, commit)
                if self._report.found == before:
                    raise error
                return
            windows, cut = self._windows(segments)
            self._read(windows, footer, commit)
            with self._report.noting(self._key):
                self._check_segments(segments)
            for row in cut:
                self._check_alone(row, footer)

    def _check_segments(self, segments: pa.Table) -> None:
        """Check for problems that no sample's own rows would show."""
        names = {*self._rows["id"].to_pylist(), *self._rows["group"].to_pylist()}
        known = pa.array(names, pa.string())
        strange = pc.invert(pc.is_in(segments["owner"], value_set=known))
        for owner in segments["owner"].filter(strange).slice(0, 1).to_pylist():
            raise TraceError(f"{self._key}: a segment of {owner}, which is not in its shard")
        for column, least in (("token_start", 0), ("tokens", 1)):
            least_found = pc.min(segments[column]).as_py()
            if least_found is not None and least_found < least:
                raise TraceError(
                    f"{self._key}: a segment with {column} {least_found}, expected {least} or more"
                )

    def _windows(self, segments: pa.Table) -> tuple[list[_Window], list[int]]:
        """Return windows of row groups, and the row numbers of the samples that windows split."""
        groups = len(self._file.row_groups)
        first, last = self._extents()
        size = len(self._geometry.layers) * self._geometry.topk * self._geometry.dtype().itemsize
        ends = np.cumsum([group.rows for group in self._file.row_groups], dtype=np.int64)
        tokens = np.concatenate([[0], np.cumsum(segments["tokens"].to_numpy(), dtype=np.int64)])
        held = tokens[ends] * size
        crossing = np.zeros(groups + 1, np.int64)  # how many samples continue after a row group
        known = first <= last
        np.add.at(crossing, first[known], 1)
        np.add.at(crossing, last[known], -1)
        crossing = np.cumsum(crossing)
        begins, begun = [0], 0
        for group in range(groups - 1):
            decoded = held[group] - begun
            following = held[group + 1] - begun
            if (decoded >= _WINDOW_BYTES and not crossing[group]) or following > _MOST_BYTES:
                begins.append(group + 1)
                begun = held[group]
        bounds = [*begins, max(groups, 1)]
        window = np.searchsorted(bounds, [first, last], side="right") - 1
        whole = window[0] == window[1]
        windows = [
            _Window(
                range(begin, min(end, groups)), np.flatnonzero(known & whole & (window[0] == i))
            )
            for i, (begin, end) in enumerate(pairwise(bounds))
        ]
        return windows, np.flatnonzero(known & ~whole).tolist()

    def _extents(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return each sample's first and last row group; 1 and 0 if its segments are invalid.

        Segments outside the file are reported here; the pass over samples reports null segments.
        Samples of one token do not have segments and are counted in the first row group.
        """
        column = self._rows["segments"].combine_chunks()
        sizes = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
        places = pc.struct_field(pc.list_flatten(column), "row").to_numpy(zero_copy_only=False)
        ends = np.cumsum([0, *(group.rows for group in self._file.row_groups)])
        of_sample = np.repeat(np.arange(len(sizes)), sizes)
        wrong = (places < 0) | (places >= ends[-1])
        for row in np.unique(of_sample[wrong]).tolist():
            found = places[(of_sample == row) & wrong][0]
            text = f"its segments name row {found} of a file of {ends[-1]}"
            self._report.add(self._key, text, self._rows["id"][row].as_py())
        groups = np.searchsorted(ends, places, side="right") - 1
        first = np.full(len(sizes), np.iinfo(np.int64).max)
        last = np.full(len(sizes), -1)
        np.minimum.at(first, of_sample, groups)
        np.maximum.at(last, of_sample, groups)
        first[sizes == 0] = last[sizes == 0] = 0
        for bad in (np.unique(of_sample[wrong]), np.flatnonzero(column.is_null().to_numpy(False))):
            first[bad], last[bad] = 1, 0
        return first, last

    def _read(self, windows: Sequence[_Window], footer: bytes, commit: str) -> None:
        """Read the entire file, window by window, and check the samples of each window."""
        ahead = _Ahead(self._store, self._key)
        extents = [self._extent(window.groups) for window in windows]
        ordered = [0, *(at for extent in extents for at in extent), self._file.data.size]
        in_order = ordered == sorted(ordered)
        if not in_order:  # windows may be in any order in the file, but the file is then read twice
            verify_file(self._store, self._file, self._report, commit)
        whole, damaged, at = hashlib.sha256(), [], 0
        for window, (_, end) in zip(windows, extents, strict=True):
            if in_order:
                ahead.hold(at, end)
                whole.update(ahead.piece)
                at = end
            try:
                self._check_others(ahead, window.groups)
                self._check_window(cast(Store, ahead), window, footer)
            except CorruptObjectError as error:
                damaged.append(str(error))
        if not in_order:
            return
        ahead.hold(at, self._file.data.size)
        whole.update(ahead.piece)
        self._report.seen[self._key] = self._file.data
        refuse_whole(self._file.data, whole.hexdigest(), commit)
        for text in damaged:
            self._report.add(self._key, text)

    def _extent(self, groups: range) -> tuple[int, int]:
        ranges = [chunk for g in groups for chunk in self._file.row_groups[g].chunks]
        if not ranges:
            return 0, 0
        return min(r.offset for r in ranges), max(r.offset + r.length for r in ranges)

    def _check_others(self, ahead: "_Ahead", groups: range) -> None:
        """Check the ranges of columns that this version of the format does not define."""
        known = set(routes_schema(self._geometry).names)
        others = [i for i, leaf in enumerate(self._file.leaves) if leaf.split(".")[0] not in known]
        ranges = [self._file.row_groups[g].chunks[i] for g in groups for i in others]
        for range_, piece in zip(ranges, ahead.pieces(ranges), strict=True):
            if hashlib.sha256(piece).hexdigest() != range_.sha256:
                raise CorruptObjectError(
                    f"{self._key}: bytes {range_.offset}..{range_.offset + range_.length}: wrong "
                    "digest in its commit, although the digest of the file is correct"
                )

    def _check_window(self, store: Store, window: _Window, footer: bytes) -> None:
        first = sum(group.rows for group in self._file.row_groups[: window.groups.start])
        rows = sum(self._file.row_groups[g].rows for g in window.groups)
        self._check_rows(store, window.samples, range(first, first + rows), footer)

    def _check_alone(self, row: int, footer: bytes) -> None:
        segments = self._rows["segments"][row].as_py()
        held = sorted({place["row"] for place in segments})
        with self._report.noting(self._key):
            self._check_rows(self._store, np.array([row]), held, footer)

    def _check_rows(
        self, store: Store, samples: npt.NDArray[np.int64], held: Sequence[int], footer: bytes
    ) -> None:
        """Decode some rows of the file, and compare them with their samples."""
        layers = self._geometry.layers
        try:
            part = read_part(store, self._file, self._geometry, layers, held, footer)
            check_unknown_rows(part, self._geometry.topk)
        except TraceError as error:
            self._report.add(self._key, str(error))
            return
        table = self._rows.take(pa.array(samples))
        rows = {
            row["id"]: {**row, "routes": [{"file": 0, "segments": row.pop("segments")}]}
            for row in table.select([*_ROW, "segments"]).to_pylist()
        }
        slices = Slices(self._geometry, {0: part}, rows, whole=True)
        for id in rows:
            with self._report.noting(self._key, id):
                slices.routes(id)


class _Ahead:
    """A store that keeps one piece of an object in memory; `hold` reads the piece in advance."""

    def __init__(self, store: Store, key: str) -> None:
        self._store, self._key = store, key
        self._start = 0
        self.piece = b""

    def hold(self, start: int, end: int) -> None:
        """Read a piece, which replaces the previous one."""
        self.piece = b""
        self._start, self.piece = start, self._store.read_range(self._key, start, end - start)

    def pieces(self, ranges: Sequence[Range]) -> list[bytes]:
        return self.read_ranges(self._key, [(r.offset, r.length) for r in ranges])

    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], size: int | None = None
    ) -> list[bytes]:
        """See Store.read_ranges."""
        end = self._start + len(self.piece)
        if any(not self._start <= at <= at + length <= end for at, length in ranges):
            return self._store.read_ranges(key, ranges, size)
        places = [at - self._start for at, _ in ranges]
        return [
            self.piece[place : place + length]
            for place, (_, length) in zip(places, ranges, strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
