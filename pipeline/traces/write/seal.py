"""Sealing a step: joining its shards into the manifest one by one, in bounded memory.

Requests for several shards overlap because, with hundreds of shards, requests take most of the
time.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, replace
from itertools import accumulate, islice

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.store import Store
from pipeline.threads import in_order
from pipeline.traces.format import domain
from pipeline.traces.format.header import Header, files_json, source, united, with_header
from pipeline.traces.format.ids import check_ids, check_once, named
from pipeline.traces.format.manifest import (
    BASELINE,
    Manifest,
    Rejected,
    SealedManifest,
    open_manifest,
)
from pipeline.traces.format.schema import MANIFEST, file_metadata
from pipeline.traces.format.types import TraceError
from pipeline.traces.read.early import is_one_of, read_shard_header, shard_rows, versions_of
from pipeline.traces.write.files import FileWriter

ROW_GROUP_SAMPLES = 65_536
_ROW_GROUP_BYTES = 64 << 20
"""Maximum size in bytes of a row group in memory. The limit is needed because readers decode
entire row groups, and error texts may be long."""
_REPEATED = [name for name in MANIFEST.names if name not in ("id", "token_digest")]


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

    Args:
        store: The store of the run.
        step: The step.
        shards: The number of shards in the step.
        ids_of_shard: Returns the sample ids that a shard must contain, excluding rejected
            groups.
        policy_version: The policy version of all response tokens; None allows any versions.
        training: Whether the trainer records the routes of this step (R2).
        rejected: The reason for each rejection, keyed by group. The samples of a rejected group are
            in the shards but not in the manifest.
        baselines: Ids of greedy samples, which are not trained on.

    Returns:
        The sealed manifest. A step that is already sealed remains unchanged.

    Raises:
        ObjectMissingError: A shard is not committed.
        TraceError: Samples are missing, duplicated or unexpected; shards differ in geometry, kind,
            policy version or the weights of one version; a token's policy version is not
            `policy_version`; a rejected group or a baseline is not in any shard; the step is
            already sealed with different arguments; or an argument is malformed.
    """
    step = domain.check_number(step, domain.MOST_STEP, "step")  # JSON cannot hold numpy integers
    domain.check_number(shards, domain.MOST_SHARD + 1, f"step {step}: number of shards", 1)
    if policy_version is not None:
        where = f"step {step}: policy_version"
        policy_version = domain.check_number(policy_version, domain.MOST, where)
    if not isinstance(training, bool):
        raise TraceError(f"step {step}: training {domain.shown(training)}, expected a bool")
    if not callable(ids_of_shard):
        raise TraceError(
            f"step {step}: ids_of_shard of type {type(ids_of_shard).__name__}, expected a function "
            "that returns the ids of a shard; pass `lambda shard: ids`"
        )
    refused = _checked_rejections(step, rejected)
    greedy = set(domain.check_names(baselines, f"step {step}: baselines"))

    def planned(shard: int) -> Sequence[str]:
        return domain.check_names(ids_of_shard(shard), f"step {step}: ids of shard {shard}")

    ours = store.size(keys.manifest(step)) is None and _seal(
        store,
        step,
        shards,
        planned,
        policy_version,
        training=training,
        rejected=refused,
        baselines=greedy,
    )
    manifest = open_manifest(store, step)
    if not ours:
        _check_arguments(manifest, shards, policy_version, training, refused)
        _check_rows(manifest, (id for s in range(shards) for id in sorted(planned(s))))
        _check_baselines(manifest, greedy)
    return manifest


def _checked_rejections(step: int, rejected: object) -> dict[str, str]:
    """Return the rejected groups and their reasons, sorted by group. Raises TraceError."""
    if not isinstance(rejected, Mapping | None):
        raise TraceError(
            f"step {step}: rejected {domain.shown(rejected)}, expected a mapping from each group "
            "to its reason"
        )
    for group, reason in (rejected or {}).items():
        domain.check_name(group, f"step {step}: rejected group")
        domain.check_line(reason, f"step {step}: reason for rejecting group {group}")
    return dict(sorted((rejected or {}).items()))


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Seal a step whose rows are in memory. A step that is already sealed remains unchanged."""
    write_id = new_write_id()
    with _writer(store, manifest, write_id) as file:
        rows = _Rows(file)
        rows.add(manifest.rows)
        _commit(store, manifest, rows, 0, write_id)


def _seal(
    store: Store,
    step: int,
    shards: int,
    ids_of_shard: Callable[[int], Sequence[str]],
    policy_version: int | None,
    *,
    training: bool,
    rejected: Mapping[str, str],
    baselines: Set[str],
) -> bool:
    """Write the manifest of committed shards; return False if another writer committed first."""
    headers = _headers(store, step, shards)
    first = headers[0]
    starts = accumulate((len(header.files) for header in headers), initial=0)
    write_id = new_write_id()
    versions: set[int] = set() if policy_version is None else {policy_version}
    counts: Counter[str] = Counter()
    hashes: list[npt.NDArray[np.int64]] = []
    unseen = set(baselines)
    head = Manifest(
        step,
        (),
        first.geometry,
        first.provenance,
        tuple(file for header in headers for file in header.files),
        MANIFEST.empty_table(),
        policies=united((header.key, header.policies) for header in headers),
        training=training,
        run=first.run,
    )
    with _writer(store, head, write_id) as file:
        rows = _Rows(file)
        tables = in_order(
            lambda at: shard_rows(store, at[0], at[1], baselines).sort_by("id"),
            zip(headers, starts, strict=False),
        )
        for shard, table in enumerate(tables):
            name = f"step {step}, shard {shard}"
            versions.update(_planned_versions(name, table, policy_version))
            unseen.difference_update(table["id"].to_pylist() if unseen else ())
            out = is_one_of(table["group"], rejected.keys())
            counts.update(table["group"].filter(out).to_pylist())
            table = table.filter(pc.invert(out))
            ids = table["id"].to_pylist()
            check_ids(name, ids, ids_of_shard(shard))
            hashes.append(np.fromiter(map(hash, ids), np.int64, len(ids)))
            rows.add(table)
        where = f"step {step} in {store.uri}"
        _check_once(where, hashes, ids_of_shard)
        _check_there(
            where, {"rejected groups": rejected.keys() - counts.keys(), "baselines": unseen}
        )
        if not rows.samples:
            raise TraceError(f"{where}: no samples, expected at least one")
        head = replace(
            head,
            policy_versions=tuple(sorted(versions)),
            rejected=tuple(Rejected(group, rejected[group], counts[group]) for group in rejected),
        )
        return _commit(store, head, rows, shards, write_id)


def _planned_versions(name: str, table: pa.Table, planned: int | None) -> tuple[int, ...]:
    """Return the policy versions of a shard. Raises TraceError for a version that is not planned.

    Args:
        name: The shard, for the error message.
        table: All rows of the shard, including rejected groups.
        planned: The version that all tokens must have; None allows any versions.
    """
    found = versions_of(table)
    if planned is not None and found not in ((), (planned,)):
        raise TraceError(
            f"{name}: tokens from policy versions {found}, but the step's plan has {planned}; "
            "remake the step"
        )
    return found


def _check_there(where: str, missing: Mapping[str, Set[str]]) -> None:
    for what, names in missing.items():
        if names:
            text = named(f"{what} missing from all shards", sorted(names))
            raise TraceError(f"{where}: {text}")


def _check_once(
    where: str,
    hashes: Sequence[npt.NDArray[np.int64]],
    ids_of_shard: Callable[[int], Sequence[str]],
) -> None:
    """Raise TraceError if two shards contain the same sample.

    A step may have millions of ids, so only their hashes are in memory. The ids themselves are
    compared if their hashes are equal.
    """
    sorted_N = np.sort(np.concatenate(hashes))
    twice = set(sorted_N[1:][sorted_N[1:] == sorted_N[:-1]].tolist())
    if twice:
        ids = (id for shard in range(len(hashes)) for id in ids_of_shard(shard))
        check_once(where, [id for id in ids if hash(id) in twice])


class _Rows:
    """Writes manifest rows in full row groups, and computes the counts for the commit."""

    def __init__(self, file: FileWriter) -> None:
        self.file = file
        self._total, self._valid, self._without = 0, 0, False
        self._hold([])

    def _hold(self, tables: list[pa.Table]) -> None:
        # Tables are joined only when a row group is written. With thousands of shards, joining each
        # new table, or adding up all bytes again, would take longer than the rest of the seal.
        self._pending = tables
        self._held: int = sum(table.num_rows for table in tables)
        self._held_bytes: int = sum(table.nbytes for table in tables)

    @property
    def samples(self) -> int:
        """Rows added so far."""
        return self.file.rows + self._held

    def add(self, table: pa.Table) -> None:
        table = table.select(MANIFEST.names).cast(MANIFEST)
        self._total += pc.sum(table["rows_total"]).as_py() or 0
        self._valid += pc.sum(table["rows_valid"]).as_py() or 0
        self._without |= table["rows_valid"].null_count > 0
        self._pending.append(table)
        self._held += table.num_rows
        self._held_bytes += table.nbytes
        while self._held >= ROW_GROUP_SAMPLES or self._is_large():
            self._cut()

    def finish(self) -> dict[str, int | None]:
        """Write the remaining rows; return the numbers of samples, tokens and rows."""
        if self._held or not self.file.rows:
            self._cut()
        return {
            "samples": self.file.rows,
            "tokens": self._total + self.file.rows,
            "rows_total": self._total,
            "rows_valid": None if self._without else self._valid,
        }

    def _cut(self) -> None:
        pending = pa.concat_tables([MANIFEST.empty_table(), *self._pending])
        rows = min(ROW_GROUP_SAMPLES, len(pending))
        while rows > 1 and pending.slice(0, rows).nbytes > _ROW_GROUP_BYTES:
            rows //= 2
        self.file.write_table(pending.slice(0, rows).combine_chunks())
        self._hold([pending.slice(rows)])

    def _is_large(self) -> bool:
        return self._held > 1 and self._held_bytes > _ROW_GROUP_BYTES


def _writer(store: Store, head: Manifest, write_id: str) -> FileWriter:
    return FileWriter(
        store,
        keys.manifest_rows(head.step, write_id),
        "manifest",
        MANIFEST,
        file_metadata("manifest", {"run": head.run, "step": head.step}),
        dictionary=_REPEATED,
    )


def _commit(store: Store, head: Manifest, rows: _Rows, shards: int, write_id: str) -> bool:
    counts = rows.finish()
    body = {
        "step": head.step,
        "policy_versions": list(head.policy_versions),
        "data": files_json(head.files),
        "shards": shards,
        "counts": counts,
        "training": head.training,
        "rejected": [asdict(group) for group in head.rejected],
    }
    files = [rows.file.finish()]
    key = keys.manifest(head.step)
    body = with_header(body, files, head.geometry, head.provenance, head.policies, head.run)
    return commit(store, key, body, write_id).ours


def _headers(store: Store, step: int, shards: int) -> list[Header]:
    """Check and return the headers of a step's shards, in order."""
    headers: list[Header] = []
    for header in in_order(lambda shard: read_shard_header(store, step, shard), range(shards)):
        headers.append(replace(header, body={}))  # of thousands of shards, only the files are kept
        _check_alike(header, headers[0])
    found = (info.key for info in store.list(keys.step_prefix(step)))
    for key in sorted(set(filter(keys.commits_shard, found)) - {header.key for header in headers}):
        raise TraceError(
            f"{key} in {store.uri}: this shard is committed too, but the step is to be sealed with "
            f"{shards} shards; seal it with all committed shards"
        )
    return headers


def _check_alike(header: Header, first: Header) -> None:
    """Raise TraceError unless a shard belongs to the same run, model and policy as the first."""
    for what, found, expected in (
        ("run", header.run, first.run),
        ("geometry", str(header.geometry), str(first.geometry)),
        ("source of routes", source(header.provenance), source(first.provenance)),
    ):
        if found != expected:
            raise TraceError(
                f"{header.key}: its {what} is {found}, expected {expected} as in {first.key}"
            )


def _check_arguments(
    manifest: SealedManifest,
    shards: int,
    policy_version: int | None,
    training: bool,
    rejected: Mapping[str, str],
) -> None:
    """Raise TraceError unless a step was sealed with these arguments."""
    head = manifest.head
    _check_same(manifest, "number of shards", manifest.shards, shards)
    if policy_version is not None:
        _check_same(manifest, "policy versions", head.policy_versions, (policy_version,))
    _check_same(manifest, "training", head.training, training)
    reasons = {group.group: group.reason for group in head.rejected}
    both = reasons.items() & rejected.items()
    theirs, ours = (dict(sorted(of.items() - both)) for of in (reasons, rejected))
    _check_same(manifest, "rejected", theirs, ours)


def _check_baselines(manifest: SealedManifest, baselines: Set[str]) -> None:
    """Raise TraceError unless a step was sealed with these baselines.

    The manifest has no rows for the baselines of rejected groups.
    """
    refused = {group.group for group in manifest.head.rejected}
    wanted = {id for id in baselines if id.rpartition("/")[0] not in refused}
    found: set[str] = set()
    for rows in manifest.batches(["id", "not_trained"]):
        found.update(rows["id"].filter(pc.equal(rows["not_trained"], BASELINE)).to_pylist())
    _check_same(manifest, "baselines", sorted(found - wanted), sorted(wanted - found))


def _check_same(manifest: SealedManifest, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise TraceError(
            f"{keys.manifest(manifest.head.step)} in {manifest.store.uri}: sealed with {what} "
            f"{domain.shown(found)}, expected {domain.shown(expected)}; a sealed step never "
            "changes: repeat the seal with the same arguments, or read the step with "
            "open_manifest()"
        )


def _check_rows(manifest: SealedManifest, expected: Iterator[str]) -> None:
    """Raise TraceError unless an existing manifest contains the expected samples in order."""
    name = f"{keys.manifest(manifest.head.step)} in {manifest.store.uri}"
    for batch in manifest.batches(["id"]):
        found = batch["id"].to_pylist()
        wanted = list(islice(expected, len(found)))
        check_ids(name, found, wanted)
        if found != wanted:
            raise TraceError(f"{name}: its samples are not in the order of their shards and ids")
    if missing := list(islice(expected, 1)):
        raise TraceError(f"{name}: sample {missing[0]} and all later ones are missing")
