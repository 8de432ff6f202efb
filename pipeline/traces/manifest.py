"""The sealed manifest of a step: one row per sample. What is not in it does not exist."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.store import Store, keys
from pipeline.store.commit import CorruptObjectError, new_attempt
from pipeline.traces.chunks import TraceFile, read_table, write_file
from pipeline.traces.header import Header, commit_header, read_header
from pipeline.traces.records import Geometry, Provenance, TraceError
from pipeline.traces.schema import MANIFEST, SAMPLES, SUMMARY, Role

_NAMED = 5  # ids that an error names before it says how many more there are
_SHARD = pa.schema([*SUMMARY, SAMPLES.field("segments"), SAMPLES.field("version_spans")])


@dataclass(frozen=True)
class FileRef:
    """A data file of a manifest, and the commit that describes its column chunks."""

    key: str
    sha256: str
    commit: str
    """Key of the commit object."""
    commit_sha256: str
    """Of the commit's content (Header.sha256)."""


@dataclass(frozen=True)
class Manifest:
    """A sealed step, or a step of a record set."""

    step: int
    policy_versions: tuple[int, ...]
    """Of the response tokens, ascending."""
    geometry: Geometry | None
    """None: the samples have no routes."""
    provenance: Provenance | None
    """Of the routes; None: there are none."""
    files: tuple[FileRef, ...]
    rows: pa.Table
    """One row per sample, ascending by id; columns as schema.MANIFEST."""

    @cached_property
    def ids(self) -> list[str]:
        """Sample ids, ascending."""
        return list(self.rows["id"].to_pylist())

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The row of each sample id."""
        return {id: i for i, id in enumerate(self.ids)}

    @property
    def policy_version(self) -> int:
        """The one policy version of all samples. Raises TraceError when there are several."""
        if len(self.policy_versions) != 1:
            raise TraceError(f"step {self.step}: policy versions {self.policy_versions}, not one")
        return self.policy_versions[0]

    def select(self, ids: Sequence[str]) -> pa.Table:
        """The rows of some samples, in the order of ids. Raises TraceError for an unknown one."""
        if unknown := [id for id in ids if id not in self.numbers]:
            raise TraceError(f"step {self.step}: {named('unknown', unknown)}")
        return self.rows.take(pa.array([self.numbers[id] for id in ids], pa.int64()))


def seal(
    store: Store,
    step: int,
    shards: int,
    expected_ids: Sequence[str],
    policy_version: int,
) -> Manifest:
    """Join the shards of a step, once they are all committed, and seal it.

    A step that is sealed already is returned as it stands. Raises TraceError when samples are
    missing, there twice or not expected, shards differ in geometry, kind or policy version, or a
    response token is of another policy version; ObjectMissingError when a shard is not committed.
    """
    if store.size(keys.manifest(step)) is None:
        headers = [read_header(store, keys.rollout(step, shard)) for shard in range(shards)]
        refs: list[FileRef] = []
        tables = []
        for shard, header in enumerate(headers):
            _check_shard(store, header, headers[0], {"step": step, "shard": shard})
            tables.append(shard_rows(store, header, len(refs)))
            refs += refs_of(header)
        joined = pa.concat_tables(tables)
        check_ids(f"step {step}", joined["id"].to_pylist(), expected_ids)
        manifest = Manifest(
            step, _versions(joined), headers[0].geometry, headers[0].provenance, tuple(refs), joined
        )
        if manifest.policy_versions != (policy_version,):
            raise TraceError(
                f"step {step}: tokens of policy versions {manifest.policy_versions}, "
                f"its plan says {policy_version}; remake the step"
            )
        write_manifest(store, manifest)
    manifest = read_manifest(store, step)
    check_ids(f"{keys.manifest(step)} in {store.uri}", manifest.ids, expected_ids)
    return manifest


def write_manifest(store: Store, manifest: Manifest) -> None:
    """Seal a step; nothing happens when it is sealed already."""
    attempt = new_attempt()
    rows = manifest.rows.select(MANIFEST.names).sort_by("id").cast(MANIFEST).combine_chunks()
    name = keys.manifest_rows(manifest.step, attempt)
    file = write_file(store, name, "manifest", [rows], MANIFEST)
    body = {
        "step": manifest.step,
        "policy_versions": list(manifest.policy_versions),
        "data": [asdict(ref) for ref in manifest.files],
        "counts": {
            "samples": rows.num_rows,
            "tokens": int(pc.sum(rows["rows_total"]).as_py() or 0) + rows.num_rows,
            "rows_total": int(pc.sum(rows["rows_total"]).as_py() or 0),
            "rows_valid": pc.sum(rows["rows_valid"]).as_py(),
        },
    }
    key = keys.manifest(manifest.step)
    commit_header(store, key, body, manifest.geometry, manifest.provenance, [file], attempt)


def read_manifest(store: Store, step: int) -> Manifest:
    """A sealed step. Raises ObjectMissingError when it is not sealed, CorruptObjectError."""
    header = read_header(store, keys.manifest(step))
    name = f"{header.key} in {store.uri}"
    try:
        refs = tuple(FileRef(**ref) for ref in header.body["data"])
        found_step, versions = header.body["step"], tuple(header.body["policy_versions"])
    except (KeyError, TypeError) as error:
        raise TraceError(f"{name}: not a manifest: {error!r}") from error
    if found_step != step or len(header.files) != 1:
        raise TraceError(f"{name}: the manifest of step {found_step}, expected step {step}")
    rows = read_table(store, header.files[0], MANIFEST).combine_chunks()
    manifest = Manifest(step, versions, header.geometry, header.provenance, refs, rows)
    if len(manifest.numbers) != len(manifest.ids):
        raise TraceError(f"{name}: {_doubles(manifest.ids)}")
    if header.geometry is not None and rows["routes_digest"].null_count:
        raise TraceError(f"{name}: samples without a digest of their routes")
    return manifest


def sealed_steps(store: Store) -> list[int]:
    """The steps that have a manifest, ascending."""
    found = [(info.key, keys.number_of(info.key)) for info in store.list(keys.steps())]
    return [step for key, step in found if step is not None and key == keys.manifest(step)]


def open_file(store: Store, manifest: Manifest, number: int) -> tuple[TraceFile, Geometry | None]:
    """A data file of a manifest as its commit describes it, and the geometry of its routes.

    Raises TraceError, ObjectMissingError, CorruptObjectError when the commit is not the one that
    the manifest was sealed with.
    """
    if not 0 <= number < len(manifest.files):
        raise TraceError(f"step {manifest.step}: file {number} of {len(manifest.files)}")
    ref = manifest.files[number]
    header = read_header(store, ref.commit)
    if header.sha256 != ref.commit_sha256:
        raise CorruptObjectError(
            f"{ref.commit} in {store.uri}: content {header.sha256[:16]}..., the manifest says "
            f"{ref.commit_sha256[:16]}...; restore the object"
        )
    for file in header.files:
        if file.data.sha256 == ref.sha256:
            # A step sealed from a record set has its files elsewhere than their commit says.
            return replace(file, data=replace(file.data, key=ref.key)), header.geometry
    raise TraceError(f"{ref.commit} in {store.uri}: it describes no file {ref.key}")


def file_of(header: Header, role: Role) -> TraceFile | None:
    """The commit's file of a role."""
    return next((file for file in header.files if file.role == role), None)


def refs_of(header: Header) -> list[FileRef]:
    """How a manifest refers to the files of a commit, in the commit's order."""
    return [
        FileRef(file.data.key, file.data.sha256, header.key, header.sha256) for file in header.files
    ]


def shard_rows(store: Store, header: Header, first: int) -> pa.Table:
    """Manifest rows of a rollout shard, and their version spans.

    `first` is the number of the shard's first file in the manifest's list.
    """
    numbers = {file.role: first + i for i, file in enumerate(header.files)}
    file = file_of(header, "samples")
    if file is None or (header.geometry is not None and "routes" not in numbers):
        raise TraceError(f"{header.key} in {store.uri}: it lists {sorted(numbers)} files")
    table = read_table(store, file, _SHARD)
    rows = len(table)
    samples = _structs(
        file=np.full(rows, numbers["samples"], np.int32), row=np.arange(rows, dtype=np.int32)
    )
    if header.geometry is None:
        routes = pa.nulls(rows, MANIFEST.field("routes").type)
    else:
        segments = table["segments"].combine_chunks()
        part = _structs(file=np.full(rows, numbers["routes"], np.int32), segments=segments)
        routes = pa.ListArray.from_arrays(np.arange(rows + 1, dtype=np.int32), part)
    return table.append_column("samples", samples).append_column("routes", routes)


def _structs(**fields: Any) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.array(f) for f in fields.values()], names=list(fields))


def _versions(rows: pa.Table) -> tuple[int, ...]:
    spans = pc.list_flatten(rows["version_spans"])
    return tuple(sorted(pc.unique(pc.struct_field(spans, "version")).to_pylist()))


def _check_shard(store: Store, header: Header, first: Header, place: dict[str, int]) -> None:
    found = {name: header.body.get(name) for name in place}
    if found != place:
        raise TraceError(f"{header.key} in {store.uri}: it is the commit of {found}")
    if header.geometry != first.geometry:
        raise TraceError(
            f"{header.key}: geometry {header.geometry}, but {first.key} has {first.geometry}"
        )
    same_source(header, first)


def same_source(header: Header, first: Header) -> None:
    """Raise TraceError unless two commits' routes are of one kind and policy version.

    The engine may differ: a run goes on after an upgrade, and each commit says who made it.
    """
    ours, theirs = (
        provenance and (provenance.kind, provenance.policy_version)
        for provenance in (header.provenance, first.provenance)
    )
    if ours != theirs:
        raise TraceError(f"{header.key}: routes of {ours}, but {first.key} has {theirs}")


def check_ids(name: str, ids: Sequence[str], expected_ids: Sequence[str]) -> None:
    """Raise TraceError, naming samples that are missing, not expected, or there twice."""
    found, expected = set(ids), set(expected_ids)
    problems = [
        named(problem, which)
        for problem, which in (
            ("missing", sorted(expected - found)),
            ("not expected", sorted(found - expected)),
        )
        if which
    ]
    if len(found) != len(ids):
        problems.append(_doubles(ids))
    if problems:
        raise TraceError(
            f"{name}: {len(ids)} samples, expected {len(expected)}; {'; '.join(problems)}"
        )


def _doubles(ids: Sequence[str]) -> str:
    return named("there twice", sorted(id for id, n in Counter(ids).items() if n > 1))


def named(problem: str, ids: Sequence[str]) -> str:
    """A problem with the first few of its samples, for an error."""
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"{problem}: {', '.join(ids[:_NAMED])}{more}"
