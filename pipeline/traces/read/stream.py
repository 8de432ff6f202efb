"""Streams that prefetch a rank's samples for a step, and the routes in the rank's layers.

While the rank computes, each stream's thread reads in the order in which the first pass needs the
samples. A route stream's thread fetches the row groups that contain the routes, several at a time
and each only once, and then checks and decodes them.
"""

import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

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
"""Maximum number of bytes per fetch. The first fetch is one row group, so that the first samples
arrive soon. Each later fetch may be twice as large as the previous one, to reduce the number of
requests."""

_AT_ONCE_DECODED = 256 << 20
"""Maximum number of decoded bytes per fetch. This separate limit is needed because identical rows
take far fewer bytes in the store than in memory."""

_Group = tuple[int, int]
"""The index of a file in the manifest, and the index of a row group in that file."""


@dataclass(frozen=True)
class _File:
    """An open routes file."""

    file: TraceFile
    geometry: Geometry
    """The geometry of the file."""
    layers: tuple[int, ...]
    """The selected layers that the file contains."""
    columns: frozenset[str]
    """The columns that are read."""
    footer: bytes


class Stream(Mapping[str, Read]):
    """A mapping from sample ids to samples, or to routes, that the stream's thread reads.

    The streams of a step may share `commits`. A look-up waits until the thread has read the sample.
    Samples that were read remain in memory. A look-up also raises the thread's errors: a TraceError
    that names the file and the sample, ObjectMissingError, CorruptObjectError or StoreError.
    """

    def __init__(self, store: Store, manifest: Manifest, commits: Commits | None = None) -> None:
        self.wait_s = 0.0
        """Total time that look-ups have waited, in seconds."""
        self._store, self._manifest = store, manifest
        self._commits = commits or Commits(store)
        self._known = manifest.numbers
        self._there: dict[str, Read] = {}
        self._changed = threading.Condition()
        self._closed = False
        thread = ThreadPoolExecutor(1, type(self).__name__)
        self._work = thread.submit(self._fetch_all)
        self._work.add_done_callback(lambda _: self._put({}))
        thread.shutdown(wait=False)  # the thread ends when its work is done

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

    def await_all(self, ids: Iterable[str]) -> None:
        """Wait until all of these samples have been read. Raises the same errors as a look-up."""
        for id in ids:
            self[id]

    def close(self) -> None:
        """Stop reading. Samples that were read remain available."""
        self._closed = True
        wait([self._work])

    @abstractmethod
    def _fetch_all(self) -> None:
        """Read in the order of the manifest's rows and pass results to `_put`, until `_closed`."""

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
            self._work.result()  # raises the thread's error
            raise TraceError(f"sample {id}: the stream ended before reading it")


class SampleStream(Stream[Sample]):
    """A stream of samples, without their routes, as `read_samples` returns them."""

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
    """A stream of routes [T, L, K] for the given layers.

    `layers` are model indices, in the order of axis L. `manifest` contains the rows of the required
    samples, in the order of their first use. Fetched routes (T * L * K ids per sample) remain in
    memory for the later passes of the step.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        layers: Sequence[int],
        commits: Commits | None = None,
    ) -> None:
        if manifest.geometry is None:
            raise TraceError(f"step {manifest.step}: no routes in its samples")
        if unknown := sorted(set(layers) - set(manifest.geometry.layers)):
            raise TraceError(
                f"step {manifest.step}: no routes for layers {unknown}, expected layers of "
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
        for row in waiting:  # no file contains rows of these samples
            self._join(row, {}, {})

    def _open_files(self, rows: Sequence[Mapping[str, Any]]) -> dict[int, _File]:
        """Open the files that contain selected layers of required samples, keyed by index."""
        files = {}
        for number in sorted({part["file"] for row in rows for part in row["routes"] or []}):
            file, geometry = open_file(self._store, self._manifest, number, self._commits)
            if geometry is None:
                raise TraceError(f"{file.data.key}: no geometry in its commit")
            layers = tuple(layer for layer in self._layers if layer in geometry.layers)
            if layers:
                here = routes_schema(Geometry(geometry.experts, geometry.topk, layers))
                footer = read_footer(self._store, file)
                self.fetched_bytes += len(footer)
                columns = frozenset(here.names)
                files[number] = _File(file, geometry, layers, columns, footer)
        return files

    def _read(
        self,
        files: Mapping[int, _File],
        groups: Sequence[_Group],
        segments: Mapping[_Group, set[int]],
    ) -> Part:
        """Read the required segments in some row groups of one file."""
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
        """Join a sample's routes, compare them with its manifest row, and wake waiting look-ups."""
        by_file: dict[int, dict[int, Part]] = {}
        for (number, group), rows in segments.items():
            by_file.setdefault(number, {}).update(dict.fromkeys(rows, there[number, group]))
        head = self._manifest.geometry
        if head is None:
            raise TraceError(f"step {self._manifest.step}: no routes in its samples")
        slices = Slices(
            Geometry(head.experts, head.topk, self._layers),
            {number: _of_sample(held) for number, held in by_file.items()},
            {row["id"]: row},
            whole=set(self._layers) == set(head.layers),
        )
        self._put({row["id"]: slices.routes(row["id"])})


def _segments_by_group(
    row: Mapping[str, Any], files: Mapping[int, _File]
) -> dict[_Group, list[int]]:
    """Return the file rows that contain a sample's routes, keyed by row group.

    In each list, the rows are in the order of their positions in the sample.
    """
    found: dict[_Group, list[int]] = {}
    for part in row["routes"] or []:
        of = files.get(part["file"])
        if of is None:
            continue
        segments = [place["row"] for place in part["segments"]]
        try:
            groups = of.file.groups_of(segments).tolist()
        except TraceError as error:
            raise TraceError(f"sample {row['id']}: {error}") from error
        for group, segment in zip(groups, segments, strict=True):
            found.setdefault((part["file"], group), []).append(segment)
    return found


def _fetches(groups: Sequence[_Group], files: Mapping[int, _File]) -> Iterator[list[_Group]]:
    """Yield lists of row groups to fetch together: consecutive row groups of the same file."""
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
    """Return the number of bytes to read from a row group."""
    return sum(range_.length for range_ in column_ranges(of.file, of.columns, [group]))


def _decoded(of: _File) -> int:
    """Return the decoded size in bytes of the selected layers in a full row group."""
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
