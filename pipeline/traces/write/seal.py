"""Sealing a step: joining its shards into the manifest, shard by shard, in bounded memory."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.run.parse import same
from pipeline.store import Store
from pipeline.traces.format import domain
from pipeline.traces.format.header import Header, read_header, same_source, with_header
from pipeline.traces.format.ids import check_ids, named
from pipeline.traces.format.manifest import (
    FileRef,
    Manifest,
    Rejected,
    SealedManifest,
    open_manifest,
    refs_of,
)
from pipeline.traces.format.policies import united
from pipeline.traces.format.schema import MANIFEST
from pipeline.traces.format.shard_rows import shard_rows
from pipeline.traces.format.types import TraceError
from pipeline.traces.write.files import FileWriter

ROW_GROUP_SAMPLES = 65_536
_ROW_GROUP_BYTES = 64 << 20
"""In memory, of a row group, which readers decode at once; texts of errors may be long."""


def seal(
    store: Store,
    step: int,
    shards: int,
    ids_of_shard: Callable[[int], Sequence[str]],
    policy_version: int | None,
    training: bool = False,
    *,
    rejected: Mapping[str, str] | None = None,
    baselines: Sequence[str] = (),
) -> SealedManifest:
    """Join the committed shards of a step and seal it.

    With `policy_version` None the response tokens may come from any policy versions. `training`:
    the trainer records the routes of this step (R2). `rejected` has the reason of each group that
    was made and not accepted: its samples are in the shards, but not in the step, nor among the
    ids of their shard. `baselines` are the ids of greedy samples, which are not trained on. A step
    that is already sealed is returned unchanged. Raises TraceError when
    a shard's samples are missing, duplicated or unexpected, when shards differ in geometry, kind or
    policy version or in the weights of one version, when a response token comes from another policy
    version, or when a rejected group is in no shard; ObjectMissingError when a shard is not
    committed.
    """
    step = domain.check_number(step, domain.MOST_STEP, "step")  # numpy's integers are no JSON
    domain.check_number(shards, domain.MOST_SHARD + 1, f"step {step}: number of shards", 1)
    if policy_version is not None:
        domain.check_number(policy_version, domain.MOST, f"step {step}: policy_version")
    refused = dict(sorted((rejected or {}).items()))
    for group, reason in refused.items():
        domain.check_name(group, f"step {step}: rejected group")
        domain.check_line(reason, f"step {step}: reason of the rejected group {group}")
    ours = store.size(keys.manifest(step)) is None and _seal(
        store,
        step,
        shards,
        ids_of_shard,
        policy_version,
        training=training,
        rejected=refused,
        baselines=baselines,
    )
    manifest = open_manifest(store, step)
    if not ours:
        _check_sealed(manifest, (id for s in range(shards) for id in sorted(ids_of_shard(s))))
    return manifest


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Seal a step with rows in memory; do nothing when it is already sealed."""
    write_id = new_write_id()
    with _writer(store, manifest.step, write_id) as file:
        rows = _Rows(file)
        rows.add(manifest.rows)
        _commit(store, manifest, rows, write_id)


def _seal(
    store: Store,
    step: int,
    shards: int,
    ids_of_shard: Callable[[int], Sequence[str]],
    policy_version: int | None,
    *,
    training: bool,
    rejected: Mapping[str, str],
    baselines: Sequence[str],
) -> bool:
    """Write the manifest of committed shards; return False when another writer was first."""
    headers: list[Header] = []
    for shard in range(shards):
        header = read_header(store, keys.rollout(step, shard))
        headers.append(_needed(header))
        _check_shard(store, header, headers[0], {"step": step, "shard": shard})
    first = headers[0]
    refs: list[FileRef] = []
    write_id = new_write_id()
    versions: set[int] = set() if policy_version is None else {policy_version}
    counts: Counter[str] = Counter()
    with _writer(store, step, write_id) as file:
        rows = _Rows(file)
        for shard, header in enumerate(headers):
            table = shard_rows(store, header, len(refs), baselines).sort_by("id")
            out = pc.is_in(table["group"], pa.array(list(rejected), pa.string()))
            counts.update(table["group"].filter(out).to_pylist())
            table = table.filter(pc.invert(out))
            name = f"step {step}, shard {shard}"
            check_ids(name, table["id"].to_pylist(), ids_of_shard(shard))
            found = _versions(table)
            if policy_version is not None and found not in ((), (policy_version,)):
                raise TraceError(
                    f"{name}: tokens of policy versions {found}, its plan says {policy_version}; "
                    "remake the step"
                )
            versions.update(found)
            refs += refs_of(header)
            rows.add(table)
        where = f"step {step} in {store.uri}"
        if missing := sorted(rejected.keys() - counts.keys()):
            raise TraceError(f"{where}: {named('rejected groups that no shard has', missing)}")
        if not rows.samples:
            raise TraceError(f"{where}: no samples, expected at least one")
        head = Manifest(
            step,
            tuple(sorted(versions)),
            first.geometry,
            first.provenance,
            tuple(refs),
            MANIFEST.empty_table(),
            policies=united((header.key, header.policies) for header in headers),
            training=training,
            rejected=tuple(Rejected(group, rejected[group], counts[group]) for group in rejected),
        )
        return _commit(store, head, rows, write_id)


class _Rows:
    """Writes manifest rows in whole row groups, and adds up the counts for the commit."""

    def __init__(self, file: FileWriter) -> None:
        self.file = file
        self._pending = MANIFEST.empty_table()
        self._total, self._valid, self._without = 0, 0, False

    @property
    def samples(self) -> int:
        """Rows added so far."""
        return self.file.rows + len(self._pending)

    def add(self, table: pa.Table) -> None:
        table = table.select(MANIFEST.names).cast(MANIFEST)
        self._total += pc.sum(table["rows_total"]).as_py() or 0
        self._valid += pc.sum(table["rows_valid"]).as_py() or 0
        self._without |= table["rows_valid"].null_count > 0
        self._pending = pa.concat_tables([self._pending, table])
        while len(self._pending) >= ROW_GROUP_SAMPLES or self._is_large():
            self._cut()

    def finish(self) -> dict[str, int | None]:
        """Write the remaining rows and return the numbers of samples, tokens and rows."""
        if len(self._pending) or not self.file.rows:
            self._cut()
        return {
            "samples": self.file.rows,
            "tokens": self._total + self.file.rows,
            "rows_total": self._total,
            "rows_valid": None if self._without else self._valid,
        }

    def _cut(self) -> None:
        rows = min(ROW_GROUP_SAMPLES, len(self._pending))
        while rows > 1 and self._pending.slice(0, rows).nbytes > _ROW_GROUP_BYTES:
            rows //= 2
        self.file.write_table(self._pending.slice(0, rows).combine_chunks())
        self._pending = self._pending.slice(rows)

    def _is_large(self) -> bool:
        return len(self._pending) > 1 and self._pending.nbytes > _ROW_GROUP_BYTES


def _writer(store: Store, step: int, write_id: str) -> FileWriter:
    return FileWriter(store, keys.manifest_rows(step, write_id), "manifest", MANIFEST)


def _commit(store: Store, head: Manifest, rows: _Rows, write_id: str) -> bool:
    counts = rows.finish()
    body = {
        "step": head.step,
        "policy_versions": list(head.policy_versions),
        "data": [asdict(ref) for ref in head.files],
        "counts": counts,
        "training": head.training,
        "rejected": [asdict(group) for group in head.rejected],
    }
    files = [rows.file.finish()]
    key = keys.manifest(head.step)
    body = with_header(body, files, head.geometry, head.provenance, head.policies)
    return commit(store, key, body, write_id).ours


def _needed(header: Header) -> Header:
    """The header without the ranges of its routes: millions in a large step, and unused here."""
    files = [
        file if file.role == "samples" else replace(file, row_groups=()) for file in header.files
    ]
    return replace(header, body={}, files=tuple(files))


def _versions(rows: pa.Table) -> tuple[int, ...]:
    spans = pc.list_flatten(rows["version_spans"])
    return tuple(sorted(pc.unique(pc.struct_field(spans, "version")).to_pylist()))


def _check_shard(store: Store, header: Header, first: Header, place: dict[str, int]) -> None:
    found = {name: header.body.get(name) for name in place}
    if not same(found, place):
        raise TraceError(f"{header.key} in {store.uri}: it is the commit of {found}")
    if header.geometry != first.geometry:
        raise TraceError(
            f"{header.key}: geometry {header.geometry}, but {first.key} has {first.geometry}"
        )
    same_source(header, first)


def _check_sealed(manifest: SealedManifest, expected: Iterator[str]) -> None:
    """Raise TraceError unless an existing manifest holds the expected samples in their order."""
    name = f"{keys.manifest(manifest.head.step)} in {manifest.store.uri}"
    for batch in manifest.batches(["id"]):
        found = batch["id"].to_pylist()
        wanted = list(islice(expected, len(found)))
        check_ids(name, found, wanted)
        if found != wanted:
            raise TraceError(f"{name}: its samples stand in another order than they are sealed in")
    if missing := list(islice(expected, 1)):
        raise TraceError(f"{name}: sample {missing[0]} and what follows it is missing")
