"""Writing rollout shards: samples and routes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import Committed, DataFile, commit
from pipeline.store import Store
from pipeline.traces.format import domain
from pipeline.traces.format.header import TraceFile, check_policies, with_header
from pipeline.traces.format.ids import check_once, named
from pipeline.traces.format.manifest import open_manifest
from pipeline.traces.format.routes import canonical
from pipeline.traces.format.types import Provenance, Routes, Sample, TraceError
from pipeline.traces.write.files import Compression
from pipeline.traces.write.rows import RoutesWriter, SampleWriter

MEMORY_BYTES = 256 << 20
"""Default limit on the size in bytes of the routes that a ShardWriter holds in memory."""


@dataclass
class _Group:
    """The unwritten samples of one prompt."""

    held: list[Sample] = field(default_factory=list)
    """Unwritten samples, with routes in stored form."""
    seen: int = 0
    """Number of samples added so far, written or not."""

    @property
    def held_bytes(self) -> int:
        return sum(_bytes(sample.routes) for sample in self.held)


class ShardWriter:
    """Writes a rollout shard while its samples are generated, in bounded memory.

    Samples may be added in any order. The writer holds the samples of a group until there are
    `group_size` of them, so that a group's samples are adjacent in the files. If the held routes
    exceed `memory_bytes`, the writer writes the held samples of the group that takes the most
    memory, and increments `groups_split`.

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
        run: Digest of the run's description; None outside a run.

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
        run: str | None = None,
    ) -> None:
        self._key = shard_key(step, shard)
        check_source(self._key, write_id, geometry, provenance, policies)
        domain.check_number(group_size, domain.MOST, f"{self._key}: group_size", 1)
        domain.check_number(memory_bytes, 2**63 - 1, f"{self._key}: memory_bytes")
        self._store, self._write_id = store, write_id
        self._step, self._shard = int(step), int(shard)  # JSON cannot hold numpy integers
        self._geometry, self._provenance = geometry, provenance
        self._group_size, self._memory_bytes = group_size, memory_bytes
        self._policies, self._run = policies, run
        self._ids: set[str] = set()
        self._branched: set[str] = set()
        self._groups: dict[str, _Group] = {}
        self._held_bytes = 0
        self._finished: list[TraceFile] = []
        self._unusable = ""
        """Why the writer refuses further work; empty if it does not."""
        self.groups_split = 0
        """How many times the held samples of a group were written early, to free memory."""
        origin = {"run": run, "step": self._step, "shard": self._shard}
        with ExitStack() as opened:  # if the second file cannot be opened, abort the first
            name = keys.rollout_file(step, shard, write_id, "samples")
            self._samples = SampleWriter(store, name, origin)
            opened.enter_context(self._samples.file)
            self._routes = None
            if geometry is not None:
                name = keys.rollout_file(step, shard, write_id, "routes")
                self._routes = RoutesWriter(store, name, origin, geometry, provenance, compression)
                opened.enter_context(self._routes.file)
            self._files = opened.pop_all()

    @property
    def upload_s(self) -> float:
        """Seconds that this writer has spent in calls to the store so far, including waiting."""
        return self._samples.file.upload_s + (self._routes.file.upload_s if self._routes else 0.0)

    @property
    def held_bytes(self) -> int:
        """Size in bytes of the routes in memory."""
        return self._held_bytes + (self._routes.held_bytes if self._routes else 0)

    def add(self, sample: Sample) -> None:
        """Add a finished sample.

        The writer copies the sample's arrays only if it has to change them, and it may hold them
        until its group is complete, so do not change them afterwards.

        Raises TraceError if the sample is malformed; the message names it.
        """
        self._add(_checked(sample, self._step, self._geometry, self._policies))

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
            self._samples.add(sample, None)
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

    def _write(self, group: _Group) -> None:
        if self._routes is None:
            return
        for sample in group.held:
            if sample.routes is not None:
                rows = len(sample.routes.valid_T)
                self._samples.add(sample, self._routes.add(sample.id, sample.routes, 0, rows))
        self._held_bytes -= group.held_bytes
        group.held.clear()
        self._routes.end_group()

    def finish(self) -> None:
        """Write the held samples and complete the files.

        Raises StoreError, and TraceError for a branch whose first sequence was not added.
        """
        if self._finished:
            return
        check_branch_of(self._key, self._branched - self._ids)
        with self._working():
            for group in self._groups.values():
                self._write(group)
            self._groups.clear()
            routes = [] if self._routes is None else [self._routes.finish()]
            self._finished = [*routes, self._samples.finish()]

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
        body = with_header(
            body, self._finished, self._geometry, self._provenance, self._policies, self._run
        )
        with self._working():
            self._check_not_late()
            return commit(self._store, self._key, body, self._write_id)

    def _check_not_late(self) -> None:
        """Raise TraceError if the step is sealed without this shard."""
        if self._store.size(keys.manifest(self._step)) is None:
            return
        if open_manifest(self._store, self._step).shards <= self._shard:
            raise TraceError(
                f"{self._key} in {self._store.uri}: the step is already sealed without this shard, "
                "expected a step that is not sealed; write the samples as part of another step"
            )

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
    run: str | None = None,
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
        run: Digest of the run's description; None outside a run.

    Returns:
        The commit; its `ours` is False if another writer committed the shard first.

    Raises:
        StoreError: The store failed.
        TraceError: A sample or an argument is malformed, or the step is already sealed without
            this shard.
    """
    key = shard_key(step, shard)
    check_source(key, write_id, geometry, provenance, policies)
    check_maker(key, maker)
    ready = [_checked(sample, step, geometry, policies) for sample in samples]
    ids = [sample.id for sample in ready]
    check_once(key, ids)
    check_branch_of(key, {sample.branch_of for sample in ready if sample.branch_of} - set(ids))
    sizes = Counter(sample.group for sample in ready)
    with ShardWriter(
        store,
        step,
        shard,
        write_id,
        geometry,
        provenance,
        max(sizes.values(), default=1),
        MEMORY_BYTES,
        policies,
        compression,
        run,
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
        TraceError: A sample is malformed; the message names it.
    """
    for sample in samples:
        domain.check_new(sample, None)
    check_once(key, [sample.id for sample in samples])
    rows = SampleWriter(store, key, {})
    with rows.file:
        for sample in samples:
            rows.add(replace(sample, routes=None), None)
        return rows.finish().data


def shard_key(step: int, shard: int) -> str:
    """Return the key of a shard's commit. Raises TraceError for numbers beyond the limits."""
    domain.check_number(step, domain.MOST_STEP, "step")
    domain.check_number(shard, domain.MOST_SHARD, f"step {step}: shard")
    return keys.rollout(step, shard)


def check_source(
    key: str,
    write_id: str,
    geometry: Geometry | None,
    provenance: Provenance | None,
    policies: Mapping[int, str] | None,
) -> None:
    """Check the common fields of a commit.

    Args:
        key: Key of the commit, for error messages.
        write_id: Write id of the commit's files.
        geometry: Geometry of the routes; None if there are no routes.
        provenance: Origin of the routes; None if there are no routes.
        policies: Weights digests, keyed by policy version; None if unknown.

    Raises:
        TraceError: A field is malformed, or only one of geometry and provenance is given.
    """
    domain.check_write_id(write_id, key)
    if (geometry is None) != (provenance is None):
        raise TraceError(f"{key}: only one of geometry and provenance, expected both or neither")
    if geometry is not None:
        domain.check_geometry(geometry, key)
        domain.check_provenance(provenance, key)
    check_policies(policies, key)


def check_maker(key: str, maker: Mapping[str, Any] | None) -> None:
    """Raise a TraceError that names the commit if `maker` is not a JSON object."""
    if not isinstance(maker, Mapping | None):
        raise TraceError(f"{key}: maker of type {type(maker).__name__}, expected a JSON object")
    domain.json_text(dict(maker or {}), f"{key}: maker")


def check_branch_of(key: str, missing: set[str]) -> None:
    """Raise TraceError if the first sequences of branches are missing."""
    if missing:
        raise TraceError(f"{key}: {named('missing first sequences of branches', sorted(missing))}")


def stored_routes(id: str, routes: Routes | None, geometry: Geometry, rows: int) -> Routes:
    """Return the routes of a sample in stored form.

    Args:
        id: The sample's id, for error messages.
        routes: The routes to check.
        geometry: The geometry that the routes must have.
        rows: The number of rows that the routes must have.

    Raises:
        TraceError: The routes are missing or malformed.
    """
    where = f"sample {domain.shown(id)}"
    if routes is None:
        raise TraceError(f"{where}: no routes; pass routes and mark unknown rows as not valid")
    domain.check_routes(routes, where)
    try:
        return canonical(routes, geometry, rows)
    except TraceError as error:
        raise TraceError(f"{where}: {error}") from error


def _checked(
    sample: Sample, step: int, geometry: Geometry | None, policies: Mapping[int, str] | None
) -> Sample:
    """Check a sample, and return it with routes in stored form. Raises TraceError."""
    domain.check_new(sample, step)
    versions = {span.version for span in sample.version_spans}
    if policies is not None and (unknown := versions - policies.keys()):
        raise TraceError(
            f"sample {sample.id}: tokens from policy version {min(unknown)}, which has no "
            f"weights digest; found digests for versions {sorted(map(int, policies))}, pass one "
            "for each version"
        )
    if geometry is None:
        if sample.routes is not None:
            raise TraceError(f"sample {sample.id}: routes in a shard without geometry")
        return sample
    rows = len(sample.prompt_tokens_P) + len(sample.response_tokens_G) - 1
    return replace(sample, routes=stored_routes(sample.id, sample.routes, geometry, rows))


def _bytes(routes: Routes | None) -> int:
    return 0 if routes is None else int(routes.sets_TLK.nbytes)
