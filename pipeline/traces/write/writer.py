"""Writing rollout shards: samples and routes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import Committed, DataFile, commit
from pipeline.store import Store
from pipeline.traces.format import domain
from pipeline.traces.format.chunks import TraceFile
from pipeline.traces.format.header import with_header
from pipeline.traces.format.ids import check_once
from pipeline.traces.format.manifest import open_manifest
from pipeline.traces.format.schema import SAMPLES
from pipeline.traces.format.types import Provenance, Routes, Sample, TraceError
from pipeline.traces.write.checked import (
    check_branch_of,
    check_maker,
    check_source,
    checked_sample,
    checked_samples,
    shard_key,
)
from pipeline.traces.write.files import FileWriter
from pipeline.traces.write.routes_file import Compression, RoutesFile
from pipeline.traces.write.rows import RowWriter, sample_row
from pipeline.traces.write.segments import SegmentRef, SegmentWriter, shared_rows

MEMORY_BYTES = 256 << 20
"""Default limit on the size in bytes of the routes that a ShardWriter holds in memory."""


@dataclass
class _Group:
    """The unwritten samples of one prompt, and the prompt rows that they share."""

    held: list[Sample] = field(default_factory=list)
    """Unwritten samples, with canonical routes."""
    seen: int = 0
    """Number of samples added so far, written or not."""
    first: Sample | None = None
    """The first sample that was written, with only the routes of its prompt."""
    prompt: list[SegmentRef] = field(default_factory=list)
    """Segments that contain the prompt's rows."""

    @property
    def held_bytes(self) -> int:
        return sum(_bytes(sample.routes) for sample in self.held)


class ShardWriter:
    """Writes a rollout shard while its samples are generated, in bounded memory.

    Samples may be added in any order. The writer holds the samples of a group until there are
    `group_size` of them, so that a group's samples are adjacent in the files. If the held routes
    exceed `memory_bytes`, the writer writes the held samples of the group that takes the most
    memory. It then keeps one copy of that group's prompt rows, and increments `groups_split`.

    The writer is a context manager: leaving the block without `commit` aborts the uploads.

    Args:
        store: The store of the run.
        step: The step.
        shard: The shard's number.
        write_id: A write id from `new_write_id` that no other writer uses.
        geometry: Geometry of the routes; None writes no routes.
        provenance: Origin of the routes; None if there are no routes.
        group_size: The number of samples in a group.
        memory_bytes: Maximum size in bytes of the routes that the writer holds.
        policies: Weights digests of the policy versions that generate the shard's samples, keyed
            by version; None if unknown.
        compression: Compression of the routes file.

    Raises:
        StoreError: The store failed.
        TraceError: An argument is malformed, or only one of geometry and provenance is given.
    """

    def __init__(
        self,
        store: Store,
        step: int,
        shard: int,
        write_id: str,
        geometry: Geometry | None,
        provenance: Provenance | None,
        group_size: int,
        memory_bytes: int = MEMORY_BYTES,
        policies: Mapping[int, str] | None = None,
        compression: Compression = "zstd",
    ) -> None:
        self._key = shard_key(step, shard)
        check_source(self._key, write_id, geometry, provenance, policies)
        domain.check_number(group_size, domain.MOST, f"{self._key}: group_size", 1)
        domain.check_number(memory_bytes, 2**63 - 1, f"{self._key}: memory_bytes")
        self._store, self._write_id = store, write_id
        self._step, self._shard = int(step), int(shard)  # JSON cannot hold numpy integers
        self._geometry, self._provenance = geometry, provenance
        self._group_size, self._memory_bytes = group_size, memory_bytes
        self._policies = policies
        self._ids: set[str] = set()
        self._branched: set[str] = set()
        self._groups: dict[str, _Group] = {}
        self._held_bytes = 0
        self._finished: list[TraceFile] = []
        self._unusable = ""
        """Why the writer refuses further work; empty if it does not."""
        self.groups_split = 0
        """How many times the held samples of a group were written early, to free memory."""
        with ExitStack() as opened:  # if the second file cannot be opened, abort the first
            name = keys.rollout_file(step, shard, write_id, "samples")
            self._samples = opened.enter_context(FileWriter(store, name, "samples", SAMPLES))
            self._routes, self._segments = None, None
            if geometry is not None:
                name = keys.rollout_file(step, shard, write_id, "routes")
                file = RoutesFile(store, name, geometry, provenance, compression=compression)
                self._routes = opened.enter_context(file)
                self._segments = SegmentWriter(self._routes)
            self._files = opened.pop_all()
        self._rows = RowWriter(self._samples)

    @property
    def upload_s(self) -> float:
        """Seconds that this writer has spent in calls to the store so far, including waiting."""
        return self._samples.upload_s + (self._routes.upload_s if self._routes else 0.0)

    @property
    def held_bytes(self) -> int:
        """Size in bytes of the routes in memory."""
        return self._held_bytes + (self._segments.held_bytes if self._segments else 0)

    def add(self, sample: Sample) -> None:
        """Add a finished sample.

        The writer copies the sample's arrays only if it has to change them, and it may hold them
        until its group is complete, so do not change them afterwards.

        Raises TraceError if a reader would refuse the sample; the message names it.
        """
        self._add(checked_sample(sample, self._step, self._geometry, self._policies))

    def _add(self, sample: Sample) -> None:
        self._check_usable()
        if self._finished:
            raise TraceError(f"{self._key}: sample {sample.id} added after finish(); add it before")
        if sample.id in self._ids:
            raise TraceError(f"{self._key}: duplicated: sample {sample.id}")
        with self._working():
            self._place_later(sample)

    def _check_usable(self) -> None:
        if self._unusable:
            raise TraceError(
                f"{self._key}: this writer {self._unusable}; write the shard again with a new one"
            )

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Refuse all further work if the block fails, because the shard may be incomplete."""
        self._check_usable()
        try:
            yield
        except BaseException:
            self._unusable = "failed"
            raise

    def _place_later(self, sample: Sample) -> None:
        """Hold a sample until its group is complete or memory is full."""
        self._ids.add(sample.id)
        if sample.branch_of is not None:
            self._branched.add(sample.branch_of)
        if sample.routes is None:
            self._rows.add(sample_row(sample, None, None))
            return
        group = self._groups.setdefault(sample.group, _Group())
        group.held.append(sample)
        group.seen += 1
        self._held_bytes += _bytes(sample.routes)
        if group.seen == self._group_size:
            self._write(group)
            del self._groups[sample.group]
        while self._held_bytes > self._memory_bytes:
            self._write(max(self._groups.values(), key=lambda group: group.held_bytes))
            self.groups_split += 1

    def finish(self) -> None:
        """Write the held samples and complete the files.

        Raises StoreError, and TraceError for a branch whose first sequence was not added.
        """
        if self._finished:
            return
        check_branch_of(self._key, self._branched, self._ids)
        with self._working():
            self._finish()

    def _finish(self) -> None:
        for group in self._groups.values():
            self._write(group)
        self._groups.clear()
        files = []
        if self._segments is not None and self._routes is not None:
            self._segments.finish()
            files.append(self._routes.finish())
        self._rows.finish()
        files.append(self._samples.finish())
        self._finished = files

    def commit(self, maker: Mapping[str, Any] | None = None) -> Committed:
        """Finish the files if necessary, and commit the shard.

        `maker` is stored in the commit unchanged. It identifies the worker that generated the
        shard, and gives the generation time in seconds. Example: {"worker": 0, "generation_s":
        1.3}. If another writer committed the shard first, the result's `ours` is False, and this
        writer's files are debris. Raises StoreError, and TraceError if the maker is not a JSON
        object or the step is already sealed without this shard.
        """
        check_maker(self._key, maker)
        self.finish()
        body = {
            "step": self._step,
            "shard": self._shard,
            "samples": len(self._ids),
            "maker": dict(maker or {}),
        }
        body = with_header(body, self._finished, self._geometry, self._provenance, self._policies)
        with self._working():
            self._check_not_late()
            return commit(self._store, self._key, body, self._write_id)

    def _check_not_late(self) -> None:
        """Raise TraceError if the step is sealed without this shard."""
        if self._store.size(keys.manifest(self._step)) is None:
            return
        sealed = open_manifest(self._store, self._step).head
        if all(ref.commit != self._key for ref in sealed.files):
            raise TraceError(
                f"{self._key} in {self._store.uri}: the step is already sealed without this shard, "
                "expected a step that is not sealed; write the samples as part of another step"
            )

    def _write(self, group: _Group) -> None:
        for sample in group.held:
            places = self._place(group, sample)
            self._rows.add(sample_row(sample, self._geometry, places))
        self._held_bytes -= group.held_bytes
        group.held.clear()
        if self._segments is not None:
            self._segments.end_group()

    def _place(self, group: _Group, sample: Sample) -> list[SegmentRef]:
        """Append a sample's rows, except those that it shares with the group's first sample."""
        routes, writer = sample.routes, self._segments
        if routes is None or writer is None:
            raise TraceError(f"{self._key}: sample {sample.id}: no routes in memory")
        rows = len(routes.valid_T)
        if group.first is None:
            # Rows that other samples may share go into separate segments.
            prompt = min(len(sample.prompt_tokens_P), rows) if self._group_size > 1 else 0
            group.prompt = writer.add(sample.group, routes, 0, prompt)
            if group.seen < self._group_size or len(group.held) > 1:
                # Copy the rows in the same memory layout as the routes that they are compared with.
                kept_LTK = routes.sets_TLK[:prompt].swapaxes(0, 1).copy()
                kept = Routes(kept_LTK.swapaxes(0, 1), routes.valid_T[:prompt].copy())
                group.first = replace(sample, routes=kept)
            return [*group.prompt, *writer.add(sample.id, routes, prompt, rows)]
        common = _shared(group.first, sample, routes)
        return [*_first(group.prompt, common), *writer.add(sample.id, routes, common, rows)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._finished:
            self._unusable = self._unusable or "was closed"
        self._files.__exit__(kind, error, trace)


def write_shard(
    store: Store,
    step: int,
    shard: int,
    write_id: str,
    samples: Sequence[Sample],
    geometry: Geometry | None,
    provenance: Provenance | None,
    maker: Mapping[str, Any] | None = None,
    policies: Mapping[int, str] | None = None,
    compression: Compression = "zstd",
) -> Committed:
    """Write the samples of a rollout shard with their routes, and commit the shard.

    All samples are checked before the first access to the store.

    Args:
        store: The store of the run.
        step: The step.
        shard: The shard's number.
        write_id: A new write id, from `new_write_id`.
        samples: All samples of the shard, in any order.
        geometry: Geometry of the routes; None writes no routes.
        provenance: Origin of the routes; None if there are no routes.
        maker: JSON object to store in the commit; see `ShardWriter.commit`.
        policies: Weights digests of the policy versions that generated the responses, keyed by
            version; None if unknown.
        compression: Compression of the routes file.

    Returns:
        The commit; its `ours` is False if another writer committed the shard first.

    Raises:
        StoreError: The store failed.
        TraceError: A reader would refuse a sample, an argument is malformed, or the step is already
            sealed without this shard.
    """
    key = shard_key(step, shard)
    check_source(key, write_id, geometry, provenance, policies)
    check_maker(key, maker)
    ready = checked_samples(samples, step, geometry, policies)
    ids = [sample.id for sample in ready]
    check_once(key, ids)
    check_branch_of(key, {sample.branch_of for sample in ready if sample.branch_of}, set(ids))
    sizes = Counter(sample.group for sample in ready)
    most = max(sizes.values(), default=1)
    with ShardWriter(
        store,
        step,
        shard,
        write_id,
        geometry,
        provenance,
        most,
        MEMORY_BYTES,
        policies,
        compression,
    ) as writer:
        for sample in ready:
            writer._add(sample)
        return writer.commit(maker)


def write_samples(store: Store, key: str, samples: Sequence[Sample]) -> DataFile:
    """Write the samples of a validation, without their routes, to a file for the caller to commit.

    Args:
        store: The store of the run.
        key: Key of the file.
        samples: The samples; their routes are ignored.

    Returns:
        The key, size and digest of the file.

    Raises:
        StoreError: The store failed.
        TraceError: A reader would refuse a sample; the message names it.
    """
    for sample in samples:
        domain.check_new(sample, None)
    check_once(key, [sample.id for sample in samples])
    with FileWriter(store, key, "samples", SAMPLES) as file:
        rows = RowWriter(file)
        for sample in samples:
            rows.add(sample_row(replace(sample, routes=None), None, None))
        rows.finish()
        return file.finish().data


def _shared(first: Sample, sample: Sample, routes: Routes) -> int:
    """Return the number of prompt rows that a sample shares with its group's first sample."""
    if first.routes is None:
        return 0
    limit = min(len(first.routes.valid_T), len(routes.valid_T))
    limit = min(limit, len(first.prompt_tokens_P), len(sample.prompt_tokens_P))
    differs_P = first.prompt_tokens_P[:limit] != sample.prompt_tokens_P[:limit]
    if np.count_nonzero(differs_P):
        limit = int(differs_P.argmax())
    return shared_rows(first.routes, routes, limit)


def _first(places: Sequence[SegmentRef], tokens: int) -> list[SegmentRef]:
    """Return references to those parts of the segments that contain the first `tokens` tokens."""
    cut = []
    for place in places:
        taken = min(place.tokens, tokens)
        if taken:
            cut.append(SegmentRef(place.row, taken))
        tokens -= taken
    return cut


def _bytes(routes: Routes | None) -> int:
    return 0 if routes is None else int(routes.sets_TLK.nbytes)
