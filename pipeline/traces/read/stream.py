"""A rank's samples of a step, and the routes of its own layers, read ahead of use.

Each stream has a thread that reads in the order in which the first pass needs the samples, while
the rank computes. For routes it fetches the row groups that hold their rows, several at once and
each one once, checks them and decodes them.
"""

import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.store import Store
from pipeline.traces.format.chunks import TraceFile, column_ranges, read_footer
from pipeline.traces.format.codec import row_bytes
from pipeline.traces.format.manifest import Commits, Manifest, open_file
from pipeline.traces.format.pages import FEW_TOKENS
from pipeline.traces.format.schema import routes_schema
from pipeline.traces.format.types import Routes, Sample, TraceError
from pipeline.traces.read.parts import Part, read_part
from pipeline.traces.read.reader import COMPARED, samples_of
from pipeline.traces.read.slices import Slices

Read = TypeVar("Read")

_AT_ONCE_BYTES = 16 << 20
"""Largest fetch. The first fetch is one row group and each next one twice as large, so that the
first samples arrive soon and later requests are few."""

_AT_ONCE_DECODED = 256 << 20
"""What the row groups of a fetch may become, which is much more where one set is in every row."""

_Group = tuple[int, int]
"""Number of a file in the manifest, and of a row group in that file."""


@dataclass(frozen=True)
class _File:
    """A routes file, opened."""

    file: TraceFile
    geometry: Geometry
    """The file's own geometry."""
    layers: tuple[int, ...]
    """The wanted layers that the file has."""
    columns: frozenset[str]
    """The columns that are read."""
    firsts: npt.NDArray[np.int64]
    """First row of each row group, then the number of rows."""
    footer: bytes


class Stream(Mapping[str, Read]):
    """Samples, or their routes, by sample id, read by the stream's own thread.

    The streams of a step may share `commits`. Looking up an id waits until it has been read, and
    raises what the reading raised: TraceError, naming file and sample; ObjectMissingError;
    CorruptObjectError; StoreError. What was read is kept.
    """

    def __init__(self, store: Store, manifest: Manifest, commits: Commits | None = None) -> None:
        self.wait_s = 0.0
        """Seconds that look-ups have waited."""
        self._store, self._manifest = store, manifest
        self._commits = commits or Commits(store)
        self._known = manifest.numbers
        self._there: dict[str, Read] = {}
        self._changed = threading.Condition()
        self._closed = False
        thread = ThreadPoolExecutor(1, type(self).__name__)
        self._work = thread.submit(self._fetch_all)
        self._work.add_done_callback(lambda _: self._put({}))
        thread.shutdown(wait=False)  # the thread ends with its work

    def __getitem__(self, id: str) -> Read:
        if id not in self._known:
            raise KeyError(id)
        if id not in self._there:
            self._wait_for(id)
        return self._there[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """Stop reading. What was read stays available."""
        self._closed = True
        wait([self._work])

    @abstractmethod
    def _fetch_all(self) -> None:
        """Read in the order of the manifest's rows and `_put` the results, until `_closed`."""

    def _put(self, read: Mapping[str, Read]) -> None:
        with self._changed:
            self._there.update(read)
            self._changed.notify_all()

    def _wait_for(self, id: str) -> None:
        started = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: id in self._there or self._work.done())
        self.wait_s += time.monotonic() - started
        if id not in self._there:
            self._work.result()  # raises the error that ended it
            raise TraceError(f"sample {id}: it was not read before the end")


class SampleStream(Stream[Sample]):
    """Samples without routes, as `read_samples` returns them, read ahead of use."""

    def _fetch_all(self) -> None:
        rows = self._manifest.rows.select([*COMPARED, "samples"]).to_pylist()
        by_file: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            by_file.setdefault(row["samples"]["file"], []).append(row)
        for number, of_file in by_file.items():
            file, _ = open_file(self._store, self._manifest, number, self._commits)
            footer = read_footer(self._store, file)
            for sample in samples_of(self._store, file, of_file, footer):
                self._put({sample.id: sample})
                if self._closed:
                    return


class RouteStream(Stream[Routes]):
    """Routes [T, L, K] of some layers (model indices) in their order, read ahead of use.

    `manifest` has the wanted samples' rows, in the order of their first use. What was fetched is
    kept, T * L * K ids per sample, for the later passes of the step.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        layers: Sequence[int],
        commits: Commits | None = None,
    ) -> None:
        if manifest.geometry is None:
            raise TraceError(f"step {manifest.step}: its samples have no routes")
        if unknown := sorted(set(layers) - set(manifest.geometry.layers)):
            raise TraceError(
                f"step {manifest.step}: no routes of layers {unknown}; it has "
                f"{manifest.geometry.layers}"
            )
        self.fetched_bytes = 0
        """Bytes fetched so far."""
        self._layers = tuple(layers)
        super().__init__(store, manifest, commits)

    def _fetch_all(self) -> None:
        if not self._layers:
            return  # a pipeline stage without MoE layers needs no routes
        rows = self._manifest.rows.to_pylist()
        files = self._open_files(rows)
        needed = {row["id"]: _segments_by_group(row, files) for row in rows}
        segments: dict[_Group, set[int]] = {}
        uses: Counter[_Group] = Counter()
        for of_sample in needed.values():
            uses.update(of_sample.keys())
            for group, here in of_sample.items():
                segments.setdefault(group, set()).update(here)
        there: dict[_Group, Part] = {}
        waiting = deque(rows)
        for groups in _fetches(list(segments), files):
            if self._closed:
                return
            there |= dict.fromkeys(groups, self._read(files, groups, segments))
            while waiting and needed[waiting[0]["id"]].keys() <= there.keys():
                row = waiting.popleft()
                self._join(row, needed[row["id"]], there)
                uses.subtract(needed[row["id"]].keys())
                for group in [group for group in needed[row["id"]] if not uses[group]]:
                    del there[group]
        for row in waiting:  # no file holds anything of them
            self._join(row, {}, {})

    def _open_files(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, _File]:
        """Open the files that hold wanted layers of wanted samples; by number."""
        files = {}
        for number in sorted({part["file"] for row in rows for part in row["routes"] or []}):
            file, geometry = open_file(self._store, self._manifest, number, self._commits)
            if geometry is None:
                raise TraceError(f"{file.data.key}: its commit names no geometry")
            layers = tuple(layer for layer in self._layers if layer in geometry.layers)
            if layers:
                here = routes_schema(Geometry(geometry.experts, geometry.topk, layers))
                firsts = np.cumsum([0, *(group.rows for group in file.row_groups)])
                footer = read_footer(self._store, file)
                self.fetched_bytes += len(footer)
                columns = frozenset(here.names)
                files[number] = _File(file, geometry, layers, columns, firsts, footer)
        return files

    def _read(
        self,
        files: Mapping[int, _File],
        groups: Sequence[_Group],
        segments: Mapping[_Group, set[int]],
    ) -> Part:
        """Read the wanted segments of some row groups of one file."""
        of = files[groups[0][0]]
        wanted = sorted(row for group in groups for row in segments[group])
        part = read_part(self._store, of.file, of.geometry, of.layers, wanted, of.footer)
        self.fetched_bytes += sum(_size(of, number) for _, number in groups)
        return part

    def _join(
        self,
        row: dict[str, Any],
        segments: Mapping[_Group, list[int]],
        there: Mapping[_Group, Part],
    ) -> None:
        """Join a sample's routes, compare them with its row, and wake the waiting look-ups."""
        by_file: dict[int, dict[int, Part]] = {}
        for (number, group), rows in segments.items():
            by_file.setdefault(number, {}).update(dict.fromkeys(rows, there[number, group]))
        head = self._manifest.geometry
        if head is None:
            raise TraceError(f"step {self._manifest.step}: its samples have no routes")
        slices = Slices(
            Geometry(head.experts, head.topk, self._layers),
            {number: _of_sample(held) for number, held in by_file.items()},
            {row["id"]: row},
            whole=self._layers == head.layers,
        )
        self._put({row["id"]: slices.routes(row["id"])})


def _segments_by_group(
    row: Mapping[str, Any], files: Mapping[int, _File]
) -> dict[_Group, list[int]]:
    """The rows of files that hold a sample's routes, by row group, in the order of positions."""
    found: dict[_Group, list[int]] = {}
    for part in row["routes"] or []:
        of = files.get(part["file"])
        if of is None:
            continue
        for place in part["segments"]:
            at = place["row"]
            if not 0 <= at < of.file.rows:
                raise TraceError(
                    f"{of.file.data.key}: sample {row['id']}: row {at} of a file of {of.file.rows}"
                )
            group = int(np.searchsorted(of.firsts, at, side="right")) - 1
            found.setdefault((part["file"], group), []).append(at)
    return found


def _fetches(groups: Sequence[_Group], files: Mapping[int, _File]) -> Iterator[list[_Group]]:
    """Yield the row groups to fetch together: consecutive in the order, and of one file."""
    at_once, size = 0, 0
    together: list[_Group] = []
    for group in groups:
        most = max(1, _AT_ONCE_DECODED // _decoded(files[group[0]]))
        full = size >= at_once or len(together) >= most
        if together and (full or group[0] != together[0][0]):
            yield together
            at_once, size, together = min(max(at_once, size) * 2, _AT_ONCE_BYTES), 0, []
        together.append(group)
        size += _size(files[group[0]], group[1])
    if together:
        yield together


def _size(of: _File, group: int) -> int:
    """Bytes to read of a row group."""
    return sum(range_.length for range_ in column_ranges(of.file, of.columns, [group]))


def _decoded(of: _File) -> int:
    """Bytes that a full row group becomes, in the wanted layers."""
    width = row_bytes(of.geometry.topk, of.geometry.experts)
    return FEW_TOKENS * width * len(of.layers)


def _of_sample(held: Mapping[int, Part]) -> Part:
    """Join the segments of a sample, which may come from several fetches, into one part."""
    parts = list({id(part): part for part in held.values()}.values())
    if len(parts) == 1:
        return parts[0]
    segments, begin = {}, 0
    for row, part in held.items():
        found = part.segments[row]
        end = begin + found.rows.stop - found.rows.start
        segments[row] = replace(found, rows=slice(begin, end))
        begin = end
    pieces = [(part, part.segments[row].rows) for row, part in held.items()]
    return Part(
        parts[0].key,
        segments,
        parts[0].layers,
        np.concatenate([part.sets_LNK[:, rows] for part, rows in pieces], axis=1),
        np.concatenate([part.valid_N[rows] for part, rows in pieces]),
        parts[0].whole,
    )
