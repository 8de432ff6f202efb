"""Writing: the samples and routes of a rollout shard, and the routes that a trainer recorded."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

from pipeline.store import Store, keys
from pipeline.store.commit import Committed, DataFile
from pipeline.traces.chunks import TraceFile
from pipeline.traces.codec import canonical
from pipeline.traces.files import FileWriter
from pipeline.traces.header import commit_header
from pipeline.traces.records import Geometry, Provenance, Routes, Sample, TraceError
from pipeline.traces.rows import RowWriter, check, sample_row
from pipeline.traces.schema import SAMPLES, routes_schema
from pipeline.traces.segments import Place, SegmentWriter, shared_rows

MEMORY_BYTES = 256 << 20
"""What a ShardWriter holds of routes at most, if not told otherwise."""


@dataclass
class _Group:
    """The samples of one prompt that are not written yet, and how to share its prompt rows."""

    held: list[Sample] = field(default_factory=list)
    """With canonical routes."""
    seen: int = 0
    """Samples that came, written or not."""
    first: Sample | None = None
    """The first one written, with the routes of its prompt alone."""
    prompt: list[Place] = field(default_factory=list)
    """Where the prompt's rows are."""

    @property
    def held_bytes(self) -> int:
        return sum(_bytes(sample.routes) for sample in self.held)


class ShardWriter:
    """Writes a rollout shard while its samples are generated, in bounded memory.

    Samples come in any order. Those of a group are held until its `group_size` have come, so that
    they lie together; when more than `memory_bytes` of routes are held, the largest group is
    written as far as it has come (but for one copy of its prompt's rows), and counted in
    `groups_split`. Without geometry the samples have
    no routes and none are written. `attempt` is a new one (`new_attempt`) for every writer.

    It is a context: when the block is left without `commit`, the uploads are taken back. Raises
    TraceError when geometry and provenance do not go together; StoreError.
    """

    def __init__(
        self,
        store: Store,
        step: int,
        shard: int,
        attempt: str,
        geometry: Geometry | None,
        provenance: Provenance | None,
        group_size: int,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._key = keys.rollout(step, shard)
        if (geometry is None) != (provenance is None):
            raise TraceError(
                f"{self._key}: geometry and provenance go together, only one was given"
            )
        self._store, self._step, self._shard, self._attempt = store, step, shard, attempt
        self._geometry, self._provenance = geometry, provenance
        self._group_size, self._memory_bytes = group_size, memory_bytes
        self._ids: set[str] = set()
        self._groups: dict[str, _Group] = {}
        self._held_bytes = 0
        self._finished: list[TraceFile] = []
        self.groups_split = 0
        """Groups whose samples do not lie together, because they did not fit into memory."""
        with ExitStack() as opened:  # an error in the second takes the first back
            name = keys.rollout_file(step, shard, attempt, "samples")
            self._samples = opened.enter_context(FileWriter(store, name, "samples", SAMPLES))
            self._routes, self._segments = None, None
            if geometry is not None:
                name = keys.rollout_file(step, shard, attempt, "routes")
                schema = routes_schema(geometry)
                self._routes = opened.enter_context(
                    FileWriter(store, name, "routes", schema, geometry, provenance)
                )
                self._segments = SegmentWriter(self._routes, geometry)
            self._files = opened.pop_all()
        self._rows = RowWriter(self._samples)

    @property
    def upload_s(self) -> float:
        """Seconds until now that the store took for the files, or made this writer wait."""
        return self._samples.upload_s + (self._routes.upload_s if self._routes else 0.0)

    @property
    def held_bytes(self) -> int:
        """Bytes of routes in memory."""
        return self._held_bytes + (self._segments.held_bytes if self._segments else 0)

    def add(self, sample: Sample) -> None:
        """Take a finished sample. Raises TraceError, naming it, for what no reader would accept."""
        check(sample)
        if sample.id in self._ids:
            raise TraceError(f"{self._key}: sample {sample.id} is there twice")
        self._ids.add(sample.id)
        if self._geometry is None:
            if sample.routes is not None:
                raise TraceError(
                    f"sample {sample.id}: it has routes, but its shard has no geometry"
                )
            self._rows.add(sample_row(sample, None, None))
            return
        rows = len(sample.tokens_S) - 1
        routes = _canonical(sample.id, sample.routes, self._geometry, rows)
        group = self._groups.setdefault(sample.group, _Group())
        group.held.append(replace(sample, routes=routes))
        group.seen += 1
        self._held_bytes += _bytes(routes)
        if group.seen == self._group_size:
            self._write(group)
            del self._groups[sample.group]
        while self._held_bytes > self._memory_bytes:
            self._write(max(self._groups.values(), key=lambda group: group.held_bytes))
            self.groups_split += 1

    def finish(self) -> None:
        """Write what is held and complete the files. Raises StoreError."""
        if self._finished:
            return
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
        """Finish, if that is not done, and commit the shard.

        `maker` goes into the commit as it is: who generated the shard and how long it took,
        {"worker": 0, "generation_s": 1.3}. When another maker of the shard was first, `ours` is
        False and this one's files are debris. Raises StoreError.
        """
        self.finish()
        body = {
            "step": self._step,
            "shard": self._shard,
            "samples": len(self._ids),
            "maker": dict(maker or {}),
        }
        return commit_header(
            self._store,
            self._key,
            body,
            self._geometry,
            self._provenance,
            self._finished,
            self._attempt,
        )

    def _write(self, group: _Group) -> None:
        for sample in group.held:
            places = self._place(group, sample)
            self._rows.add(sample_row(sample, self._geometry, places))
        self._held_bytes -= group.held_bytes
        group.held.clear()
        if self._segments is not None:
            self._segments.end_group()

    def _place(self, group: _Group, sample: Sample) -> list[Place]:
        """Append a sample's rows, but those that the group's first sample has too."""
        routes, writer = sample.routes, self._segments
        if routes is None or writer is None:
            raise TraceError(f"{self._key}: sample {sample.id}: no routes are held")
        rows = len(routes.valid_T)
        if group.first is None:
            # What others may share is a segment of its own.
            prompt = min(len(sample.prompt_tokens_P), rows) if self._group_size > 1 else 0
            group.prompt = writer.add(sample.group, routes, 0, prompt)
            if group.seen < self._group_size or len(group.held) > 1:
                kept = Routes(routes.sets_TLK[:prompt].copy(), routes.valid_T[:prompt].copy())
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
        self._files.__exit__(kind, error, trace)


def write_shard(
    store: Store,
    step: int,
    shard: int,
    attempt: str,
    samples: Sequence[Sample],
    geometry: Geometry | None,
    provenance: Provenance | None,
    maker: Mapping[str, Any] | None = None,
) -> Committed:
    """Write the samples of a rollout shard, with their routes, and commit them.

    Arguments, `ours` and errors as of ShardWriter.
    """
    sizes: dict[str, int] = {}
    for sample in samples:
        sizes[sample.group] = sizes.get(sample.group, 0) + 1
    most = max(sizes.values(), default=1)
    with ShardWriter(store, step, shard, attempt, geometry, provenance, most) as writer:
        for sample in samples:
            writer.add(sample)
        return writer.commit(maker)


def write_training_routes(
    store: Store,
    step: int,
    stage: int,
    dp_rank: int,
    attempt: str,
    routes: Mapping[str, Routes],
    geometry: Geometry,
    provenance: Provenance,
) -> Committed:
    """Write the routes of a pipeline stage's layers and a data-parallel rank's samples (R2).

    `geometry` has this stage's layers only; `routes` are by sample id. `attempt`, `ours` and
    errors as in `write_shard`.
    """
    name = keys.training_file(step, stage, dp_rank, attempt)
    schema = routes_schema(geometry)
    with FileWriter(store, name, "routes", schema, geometry, provenance) as file:
        segments = SegmentWriter(file, geometry)
        for id, of_sample in routes.items():
            rows = len(of_sample.valid_T)
            segments.add(id, _canonical(id, of_sample, geometry, rows), 0, rows)
        segments.finish()
        written = file.finish()
    body = {"step": step, "stage": stage, "dp_rank": dp_rank, "samples": len(routes)}
    key = keys.training(step, stage, dp_rank)
    return commit_header(store, key, body, geometry, provenance, [written], attempt)


def write_samples(store: Store, key: str, samples: Sequence[Sample]) -> DataFile:
    """Write samples without their routes as one file, for the caller to commit (validation).

    Raises TraceError, naming the sample; StoreError.
    """
    ids = [sample.id for sample in samples]
    if len(set(ids)) != len(ids):
        double = next(id for i, id in enumerate(ids) if id in ids[:i])
        raise TraceError(f"{key}: sample {double} is there twice")
    with FileWriter(store, key, "samples", SAMPLES) as file:
        rows = RowWriter(file)
        for sample in samples:
            check(sample)
            rows.add(sample_row(replace(sample, routes=None), None, None))
        rows.finish()
        return file.finish().data


def _shared(first: Sample, sample: Sample, routes: Routes) -> int:
    """How many prompt rows of the group's first sample another one has too."""
    if first.routes is None:
        return 0
    limit = min(len(first.routes.valid_T), len(routes.valid_T))
    limit = min(limit, len(first.prompt_tokens_P), len(sample.prompt_tokens_P))
    differs_P = first.prompt_tokens_P[:limit] != sample.prompt_tokens_P[:limit]
    if differs_P.any():
        limit = int(differs_P.argmax())
    return shared_rows(first.routes, routes, limit)


def _first(places: Sequence[Place], tokens: int) -> list[Place]:
    """The places of the first tokens of what lies there."""
    cut = []
    for place in places:
        taken = min(place.tokens, tokens)
        if taken:
            cut.append(Place(place.row, taken))
        tokens -= taken
    return cut


def _bytes(routes: Routes | None) -> int:
    return 0 if routes is None else int(routes.sets_TLK.nbytes)


def _canonical(id: str, routes: Routes | None, geometry: Geometry, rows: int) -> Routes:
    if routes is None:
        raise TraceError(
            f"sample {id}: no routes; a row that is not known is one that is not valid"
        )
    try:
        return canonical(routes, geometry, rows)
    except TraceError as error:
        raise TraceError(f"sample {id}: {error}") from error
