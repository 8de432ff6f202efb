"""The sealed manifest of a step: one row per sample. Generated samples without a row are not used.

Rows are ordered by shard and, within a shard, by id, so the samples of a group are adjacent.
`open_manifest` gives access to single columns and rows, so that a large step does not have to fit
into memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.run.parse import field, flag, key, listed, mapping, number, text
from pipeline.store import Store
from pipeline.traces.format.chunks import TraceFile, read_table
from pipeline.traces.format.domain import (
    MOST_STEP,
    check_line,
    check_name,
    check_names,
    check_number,
    shown,
)
from pipeline.traces.format.header import Header, read_header
from pipeline.traces.format.ids import check_once, doubles, named
from pipeline.traces.format.schema import FORMAT, MANIFEST, Role
from pipeline.traces.format.types import Provenance, TraceError, check_array

_BATCH_BYTES = 64 << 20
_BATCH_SAMPLES = 256
_TOKEN_BYTES = 16
"""Upper estimate of the memory of a token id, its log-prob and its mask."""


@dataclass(frozen=True)
class FileRef:
    """A data file that a manifest lists, and the commit that describes its column chunks."""

    key: str
    sha256: str
    commit: str
    """Key of the commit object that describes the file."""
    commit_sha256: str
    """Digest of the commit's content (Header.sha256)."""


@dataclass(frozen=True)
class Rejected:
    """A group that was not accepted. Example: Rejected('000003/17', 'too long', 8)."""

    group: str
    reason: str
    samples: int
    """The number of the group's samples, which are in the samples files of the step's shards."""


@dataclass(frozen=True)
class Manifest:
    """A sealed step, or a step of a recorded set, with its rows in memory."""

    step: int
    policy_versions: tuple[int, ...]
    """The policy versions of the response tokens, in ascending order."""
    geometry: Geometry | None
    """Geometry of the routes; None if the samples have no routes."""
    provenance: Provenance | None
    """Origin of the routes; None if the samples have no routes."""
    files: tuple[FileRef, ...]
    rows: pa.Table
    """One row per sample, for all or some samples of the step (columns: schema.MANIFEST)."""
    policies: Mapping[int, str] | None = None
    """Weights digests, keyed by policy version; None if unknown (always in format 1.0)."""
    training: bool = False
    """Whether the trainer records the routes of this step (R2), in separate files."""
    rejected: tuple[Rejected, ...] = ()
    """Groups that were generated but not accepted; their samples have no rows."""
    format: str = FORMAT
    """The format version in which manifest.json was written, such as '1.0' or '1.1'."""
    sha256: str = ""
    """Digest of the content of manifest.json; empty if the step is not sealed. Training commits
    contain this digest."""

    @cached_property
    def ids(self) -> list[str]:
        """Sample ids, in the order of the rows."""
        return list(self.rows["id"].to_pylist())

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The row number of each sample id."""
        return {id: i for i, id in enumerate(self.ids)}

    @property
    def policy_version(self) -> int:
        """The policy version of all samples. Raises TraceError if there are several versions."""
        if len(self.policy_versions) != 1:
            raise TraceError(f"step {self.step}: versions {self.policy_versions}, expected one")
        return self.policy_versions[0]

    def select(self, ids: Iterable[str]) -> pa.Table:
        """Return the samples' rows, in the order of `ids`.

        Raises TraceError for an unknown id, and for an id that is not a str.
        """
        ids = check_names(ids, f"step {self.step}: ids")
        if unknown := [id for id in ids if id not in self.numbers]:
            raise TraceError(f"step {self.step}: {named('unknown', unknown)}")
        return self.rows.take(pa.array([self.numbers[id] for id in ids], pa.int64()))

    def id_batches(self, ids: Iterable[str] | None = None) -> Iterator[list[str]]:
        """Yield ids in batches whose samples, with their routes, fit in memory together.

        A larger sample than 64 MiB is alone in its batch.

        Args:
            ids: The ids, in the order of the batches; None yields all ids of the manifest.

        Raises:
            TraceError: An id is unknown or is not a str.
        """
        wanted = self.ids if ids is None else check_names(ids, f"step {self.step}: ids")
        token = _TOKEN_BYTES + (0 if self.geometry is None else self.geometry.row_bytes)
        batch: list[str] = []
        held = 0
        for id, rows in zip(wanted, self.select(wanted)["rows_total"].to_pylist(), strict=True):
            if batch and (held + rows * token > _BATCH_BYTES or len(batch) == _BATCH_SAMPLES):
                yield batch
                batch, held = [], 0
            batch.append(id)
            held += rows * token
        if batch:
            yield batch


@dataclass(frozen=True)
class SealedManifest:
    """A sealed step whose rows are in the store."""

    store: Store
    head: Manifest
    """The manifest, without rows."""
    file: TraceFile
    """The file that contains the rows."""

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.file.rows

    def columns(self, names: Iterable[str]) -> pa.Table:
        """Read some columns of all rows. Only the bytes of these columns are fetched and checked.

        The column `group` is returned as a dictionary column, because its strings repeat. Raises
        TraceError for a column that is unknown or named twice, and the same errors as
        `read_manifest`.
        """
        return read_table(self.store, self.file, pa.schema(map(_repeating, self._fields(names))))

    def select(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> Manifest:
        """Read the rows with the given numbers, in this order. Only their row groups are fetched.

        Raises TraceError for a number out of range and for anything but row numbers in one
        dimension, and the same errors as `read_manifest`.
        """
        where = f"step {self.head.step}: rows"
        wanted = check_array(rows, where)
        numbers = wanted.dtype.kind in "iu" or not wanted.size
        if wanted.ndim != 1 or not numbers:  # a mask, a single number, or numbers beyond 64 bits
            raise TraceError(
                f"{where} of type {wanted.dtype} and shape {wanted.shape}, expected row numbers in "
                "one dimension"
            )
        wanted = wanted.astype(np.int64)
        order = np.argsort(wanted, kind="stable")
        groups = self.file.groups_of(wanted[order])
        firsts = self.file.first_rows
        found = []
        for group in np.unique(groups):
            table = read_table(self.store, self.file, MANIFEST, [int(group)])
            found.append(table.take(pa.array(wanted[order][groups == group] - firsts[group])))
        table = pa.concat_tables([*found, MANIFEST.empty_table()])
        table = table.take(pa.array(np.argsort(order, kind="stable"))).combine_chunks()
        return self._checked(replace(self.head, rows=table))

    def all(self) -> Manifest:
        """Read every row. Raises the same errors as `read_manifest`."""
        rows = read_table(self.store, self.file, MANIFEST).combine_chunks()
        return self._checked(replace(self.head, rows=rows))

    def batches(self, names: Iterable[str]) -> Iterator[pa.Table]:
        """Read some columns of all rows, one row group at a time. Raises errors like `columns`."""
        schema = pa.schema(self._fields(names))
        for group in range(len(self.file.row_groups)):
            yield read_table(self.store, self.file, schema, [group])

    def _fields(self, names: Iterable[str]) -> list[pa.Field]:
        where = f"step {self.head.step}: columns"
        wanted = check_names(names, where)
        if unknown := [name for name in wanted if name not in MANIFEST.names]:
            raise TraceError(
                f"{where}: no column {shown(unknown[0])}, expected columns of {MANIFEST.names}"
            )
        check_once(where, wanted)
        return [MANIFEST.field(name) for name in wanted]

    def _checked(self, manifest: Manifest) -> Manifest:
        name = f"{keys.manifest(manifest.step)} in {self.store.uri}"
        if len(manifest.numbers) != len(manifest.ids):
            raise TraceError(f"{name}: {doubles(manifest.ids)}")
        for column in ("routes_digest", "rows_valid"):
            if manifest.geometry is not None and manifest.rows[column].null_count:
                raise TraceError(f"{name}: samples without {column}, expected it with routes")
        excluded = manifest.rows.filter(pc.is_valid(manifest.rows["not_trained"]))
        for id, reason in zip(
            *(excluded[n].to_pylist() for n in ("id", "not_trained")), strict=True
        ):
            check_line(reason, f"{name}: sample {shown(id)}: not_trained")
        return manifest


def open_manifest(store: Store, step: int) -> SealedManifest:
    """Open a sealed step without reading its rows. Raises the same errors as `read_manifest`."""
    step = check_number(step, MOST_STEP, "step")
    header = read_header(store, keys.manifest(step))
    body, name = header.body, f"{header.key} in {store.uri}"
    try:
        refs = tuple(field(body, "data", listed(_file_ref)))
        found_step = field(body, "step", number)
        versions = tuple(field(body, "policy_versions", listed(number)))
        training = bool(header.minor) and field(body, "training", flag)
        rejected = tuple(field(body, "rejected", listed(_rejected)) if header.minor else ())
    except ValueError as error:
        raise TraceError(f"{name}: {error}; remake the object") from error
    for group in rejected:
        check_name(group.group, f"{name}: rejected group")
        check_line(group.reason, f"{name}: reason of a rejected group")
    if found_step != step:
        raise TraceError(f"{name}: the manifest of step {found_step}, expected step {step}")
    if len(header.files) != 1:
        raise TraceError(f"{name}: {len(header.files)} files of rows, expected one")
    head = Manifest(
        step,
        versions,
        header.geometry,
        header.provenance,
        refs,
        MANIFEST.empty_table(),
        policies=header.policies,
        training=training,
        rejected=rejected,
        format=body["format"],
        sha256=header.sha256,
    )
    return SealedManifest(store, head, header.files[0])


def _file_ref(value: Any) -> FileRef:
    body = mapping(value)
    return FileRef(
        key=field(body, "key", key),
        sha256=field(body, "sha256", text),
        commit=field(body, "commit", key),
        commit_sha256=field(body, "commit_sha256", text),
    )


def _rejected(value: Any) -> Rejected:
    body = mapping(value)
    return Rejected(
        group=field(body, "group", text),
        reason=field(body, "reason", text),
        samples=field(body, "samples", number),
    )


def read_manifest(store: Store, step: int) -> Manifest:
    """Read a sealed step with all its rows.

    Raises ObjectMissingError if the step is not sealed. Also raises CorruptObjectError and
    TraceError.
    """
    return open_manifest(store, step).all()


def check_manifest(manifest: object, where: str) -> Manifest:
    """Return a manifest. Raises TraceError for anything else, such as a `SealedManifest`."""
    if not isinstance(manifest, Manifest):
        raise TraceError(
            f"{where}: found a {type(manifest).__name__}, expected a Manifest; use read_manifest, "
            "open_shard or .all()"
        )
    return manifest


def _repeating(field: pa.Field) -> pa.Field:
    return (
        field.with_type(pa.dictionary(pa.int32(), pa.string())) if field.name == "group" else field
    )


def sealed_steps(store: Store) -> list[int]:
    """Return the steps that have a manifest, in ascending order."""
    found = [(info.key, keys.number_of(info.key)) for info in store.list(keys.steps())]
    return [step for key, step in found if step is not None and key == keys.manifest(step)]


class Commits:
    """A cache of trace commits. Each commit is read once. Threads can share the cache."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = Lock()
        self._read: dict[str, Header] = {}

    def header(self, key: str) -> Header:
        """Return the commit that is stored under a key. Raises the same errors as `read_header`."""
        with self._lock:
            if key not in self._read:
                self._read[key] = read_header(self._store, key)
            return self._read[key]


def open_file(
    store: Store, manifest: Manifest, number: int, commits: Commits | None = None
) -> tuple[TraceFile, Geometry | None]:
    """Return a manifest's data file as described in its commit, and the geometry of the routes.

    Args:
        store: The store that contains the commit.
        manifest: The manifest that lists the file.
        number: The file's index in the manifest's list.
        commits: Cache of commits; None reads the commit from the store.

    Raises:
        ObjectMissingError: The commit is not in the store.
        CorruptObjectError: The commit differs from the one that the sealed manifest names.
        TraceError: The manifest or the commit does not list the file.
    """
    if not 0 <= number < len(manifest.files):
        here = f"0..{len(manifest.files) - 1}" if manifest.files else "no files"
        raise TraceError(
            f"{keys.manifest(manifest.step)} in {store.uri}: a sample refers to file {number}, "
            f"expected {here}; remake the step"
        )
    ref = manifest.files[number]
    header = (commits or Commits(store)).header(ref.commit)
    if header.sha256 != ref.commit_sha256:
        raise CorruptObjectError(
            f"{ref.commit} in {store.uri}: content {header.sha256[:16]}..., but the manifest "
            f"records {ref.commit_sha256[:16]}...; restore the object"
        )
    for file in header.files:
        if file.data.sha256 == ref.sha256:
            # In a step that is sealed from a recorded set, the file's key differs from the key in
            # its commit.
            return replace(file, data=replace(file.data, key=ref.key)), header.geometry
    raise TraceError(f"{ref.commit} in {store.uri}: no file {ref.key} in this commit")


def file_of(header: Header, role: Role) -> TraceFile | None:
    """Return a commit's file with the given role; None if the commit does not list one."""
    return next((file for file in header.files if file.role == role), None)


def refs_of(header: Header) -> list[FileRef]:
    """Return the references with which a manifest lists a commit's files, in the same order."""
    return [
        FileRef(file.data.key, file.data.sha256, header.key, header.sha256) for file in header.files
    ]


def is_pruned(store: Store, step: int) -> bool:
    """Return whether a step's samples and routes were removed, or are being removed."""
    return store.size(keys.pruned(step)) is not None


def refuse_pruned(store: Store, step: int) -> None:
    """Raise TraceError if a step's samples and routes were removed, or are being removed."""
    if is_pruned(store, step):
        raise TraceError(
            f"step {step} of {store.uri}: its samples and routes were removed "
            f"({keys.pruned(step)}); only its manifest and metrics remain"
        )
