"""Streams that prefetch a rank's samples for a step, and the routes in the rank's layers.

While the rank computes, each stream's thread reads in the order in which the first pass needs the
samples. A route stream's thread fetches the row groups that contain the routes, several at a time
and each only once.
"""

import threading
import time
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from pipeline.store import Store
from pipeline.traces.format.manifest import Manifest
from pipeline.traces.format.types import Routes, Sample, TraceError
from pipeline.traces.read.reader import (
    ROUTES_OF,
    Part,
    Place,
    RoutesFile,
    groups_of,
    join,
    mostly_needed,
    open_routes,
    selected_layers,
    stored_samples,
)

Read = TypeVar("Read")

_AT_ONCE_BYTES = 16 << 20
"""Maximum number of bytes per fetch. The first fetch is one row group, so that the first samples
arrive soon. Each later fetch may be twice as large as the previous one, to reduce the number of
requests."""
_AT_ONCE_ROWS = 1 << 20
"""Maximum number of rows per fetch, because equal rows take far fewer bytes in the store than in
memory."""


class Stream(Mapping[str, Read]):
    """A mapping from sample ids to samples, or to routes, that the stream's thread reads.

    A look-up waits until the thread has read the sample.
    Samples that were read remain in memory. A look-up also raises the thread's errors: a TraceError
    that names the file and the sample, ObjectMissingError, CorruptObjectError or StoreError.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.wait_s = 0.0
        """Total time that look-ups have waited, in seconds."""
        self._store, self._manifest = store, manifest
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
        for sample in stored_samples(self._store, self._manifest, self._manifest.rows):
            self._put({sample.id: sample})
            if self._closed:
                return


class RouteStream(Stream[Routes]):
    """A stream of routes [T, L, K] for the given layers.

    `layers` are model indices, in the order of axis L. `manifest` contains the rows of the required
    samples, in the order of their first use. Fetched routes (T * L * K ids per sample) remain in
    memory for the later passes of the step. A sample may share the memory of its row group.
    """

    def __init__(self, store: Store, manifest: Manifest, layers: Sequence[int]) -> None:
        self.fetched_bytes = 0
        """Bytes of column chunks fetched so far."""
        # A pipeline stage without MoE layers needs no routes.
        self._geometry = selected_layers(manifest, layers) if layers else None
        super().__init__(store, manifest)

    def _fetch_all(self) -> None:
        if self._geometry is None:
            return
        rows = self._manifest.rows.select(ROUTES_OF).to_pylist()
        files = open_routes(self._store, self._manifest, rows, self._geometry.layers)
        needed = {row["id"]: groups_of(row, files) for row in rows}
        lent = mostly_needed(needed.values(), files)
        uses = Counter(group for of_sample in needed.values() for group in of_sample)
        there: dict[Place, Part] = {}
        waiting = deque(rows)
        for groups in _fetches(list(uses), files):
            if self._closed:
                return
            number = groups[0][0]
            found = files[number].read([group for _, group in groups])
            there |= {(number, group): part for group, part in found.items()}
            self.fetched_bytes += sum(files[number].bytes_of(group) for _, group in groups)
            while waiting and there.keys() >= set(needed[waiting[0]["id"]]):
                row = waiting.popleft()
                self._put({row["id"]: join(row, self._geometry, files, there, lent)})
                uses.subtract(needed[row["id"]].keys())
                for group in [group for group in needed[row["id"]] if not uses[group]]:
                    del there[group]
        for row in waiting:  # no file contains rows of these samples
            self._put({row["id"]: join(row, self._geometry, files, {}, lent)})


def _fetches(groups: Sequence[Place], files: Mapping[int, RoutesFile]) -> Iterator[list[Place]]:
    """Yield lists of row groups to fetch together: row groups of the same file."""
    at_once, size, rows = 0, 0, 0
    together: list[Place] = []
    for number, group in groups:
        full = size >= at_once or rows >= _AT_ONCE_ROWS
        if together and (full or number != together[0][0]):
            yield together
            at_once, size, rows, together = min(max(at_once, size) * 2, _AT_ONCE_BYTES), 0, 0, []
        together.append((number, group))
        size += files[number].bytes_of(group)
        rows += int(files[number].opened.metadata.row_group(group).num_rows)
    if together:
        yield together
