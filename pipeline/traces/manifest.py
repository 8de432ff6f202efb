"""The sealed manifest of a step: one row per sample. What is not in it does not exist.

Rows stand shard after shard and, in a shard, ascending by id, so the samples of a group are
neighbours. `open_manifest` reads the columns and rows that are asked for, whatever the step's size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock

import numpy as np
import pyarrow as pa

from pipeline.store import Store, keys
from pipeline.store.commit import CorruptObjectError
from pipeline.traces.chunks import TraceFile, read_table
from pipeline.traces.header import Header, read_header
from pipeline.traces.ids import doubles, named
from pipeline.traces.parse import items, key, number, text
from pipeline.traces.records import Geometry, Provenance, TraceError
from pipeline.traces.schema import MANIFEST, Role


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
    """A sealed step, or a step of a record set, with its rows in memory."""

    step: int
    policy_versions: tuple[int, ...]
    """Of the response tokens, ascending."""
    geometry: Geometry | None
    """None: the samples have no routes."""
    provenance: Provenance | None
    """Of the routes; None: there are none."""
    files: tuple[FileRef, ...]
    rows: pa.Table
    """One row per sample, all of the step's or some; columns as schema.MANIFEST."""

    @cached_property
    def ids(self) -> list[str]:
        """Sample ids, in the order of the rows."""
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


@dataclass(frozen=True)
class SealedManifest:
    """A sealed step whose rows are in the store."""

    store: Store
    head: Manifest
    """The manifest without rows."""
    file: TraceFile
    """Of the rows."""

    @property
    def samples(self) -> int:
        """How many there are."""
        return self.file.rows

    def columns(self, names: Sequence[str]) -> pa.Table:
        """Some columns of all rows; only their bytes are fetched, and checked.

        Strings that repeat come as dictionaries: `group`. Raises as `read_manifest`.
        """
        fields = [MANIFEST.field(name) for name in names]
        return read_table(self.store, self.file, pa.schema(map(_repeating, fields)))

    def select(self, rows: Sequence[int]) -> Manifest:
        """Some rows, by their numbers, in this order; the row groups without them stay unread.

        Raises TraceError for a number that there is not; as `read_manifest`.
        """
        wanted = np.asarray(rows, np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < self.samples:
            raise TraceError(
                f"step {self.head.step}: rows {wanted.min()}..{wanted.max()} of {self.samples}"
            )
        firsts = np.cumsum([0, *(group.rows for group in self.file.row_groups)])
        found = []
        order = np.argsort(wanted, kind="stable")
        groups = np.searchsorted(firsts, wanted[order], side="right") - 1
        for group in np.unique(groups):
            table = read_table(self.store, self.file, MANIFEST, [int(group)])
            found.append(table.take(pa.array(wanted[order][groups == group] - firsts[group])))
        table = pa.concat_tables([*found, MANIFEST.empty_table()])
        table = table.take(pa.array(np.argsort(order, kind="stable"))).combine_chunks()
        return self._checked(replace(self.head, rows=table))

    def all(self) -> Manifest:
        """Every row. Raises as `read_manifest`."""
        rows = read_table(self.store, self.file, MANIFEST).combine_chunks()
        return self._checked(replace(self.head, rows=rows))

    def batches(self, names: Sequence[str]) -> Iterator[pa.Table]:
        """Some columns of all rows, a row group at a time."""
        schema = pa.schema([MANIFEST.field(name) for name in names])
        for group in range(len(self.file.row_groups)):
            yield read_table(self.store, self.file, schema, [group])

    def _checked(self, manifest: Manifest) -> Manifest:
        name = f"{keys.manifest(manifest.step)} in {self.store.uri}"
        if len(manifest.numbers) != len(manifest.ids):
            raise TraceError(f"{name}: {doubles(manifest.ids)}")
        if manifest.geometry is not None and manifest.rows["routes_digest"].null_count:
            raise TraceError(f"{name}: samples without a digest of their routes")
        return manifest


def open_manifest(store: Store, step: int) -> SealedManifest:
    """A sealed step, its rows unread. Raises as `read_manifest`."""
    header = read_header(store, keys.manifest(step))
    name = f"{header.key} in {store.uri}"
    try:
        refs = tuple(
            FileRef(
                key(ref["key"]), text(ref["sha256"]), key(ref["commit"]), text(ref["commit_sha256"])
            )
            for ref in items(header.body["data"])
        )
        found_step = header.body["step"]
        versions = tuple(number(version) for version in items(header.body["policy_versions"]))
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{name}: not a manifest: {error!r}") from error
    if found_step != step or len(header.files) != 1:
        raise TraceError(f"{name}: the manifest of step {found_step}, expected step {step}")
    head = Manifest(
        step, versions, header.geometry, header.provenance, refs, MANIFEST.empty_table()
    )
    return SealedManifest(store, head, header.files[0])


def read_manifest(store: Store, step: int) -> Manifest:
    """A sealed step with all its rows.

    Raises ObjectMissingError when it is not sealed, CorruptObjectError, TraceError.
    """
    return open_manifest(store, step).all()


def _repeating(field: pa.Field) -> pa.Field:
    return (
        field.with_type(pa.dictionary(pa.int32(), pa.string())) if field.name == "group" else field
    )


def sealed_steps(store: Store) -> list[int]:
    """The steps that have a manifest, ascending."""
    found = [(info.key, keys.number_of(info.key)) for info in store.list(keys.steps())]
    return [step for key, step in found if step is not None and key == keys.manifest(step)]


class Commits:
    """Commits of traces, each read once, whatever threads ask for it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = Lock()
        self._read: dict[str, Header] = {}

    def header(self, key: str) -> Header:
        """Raises as `read_header`."""
        with self._lock:
            if key not in self._read:
                self._read[key] = read_header(self._store, key)
            return self._read[key]


def open_file(
    store: Store, manifest: Manifest, number: int, commits: Commits | None = None
) -> tuple[TraceFile, Geometry | None]:
    """A data file of a manifest as its commit describes it, and the geometry of its routes.

    `commits` has those that were read before. Raises TraceError, ObjectMissingError,
    CorruptObjectError when the commit is not the one that the manifest was sealed with.
    """
    if not 0 <= number < len(manifest.files):
        raise TraceError(f"step {manifest.step}: file {number} of {len(manifest.files)}")
    ref = manifest.files[number]
    header = (commits or Commits(store)).header(ref.commit)
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
