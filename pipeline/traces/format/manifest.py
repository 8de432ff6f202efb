"""The sealed manifest of a step: one row per sample. Generated samples without a row are not used.

Rows are ordered by shard and, within a shard, by id, so the samples of a group are adjacent.
`open_manifest` gives access to single columns and rows, so that a large step does not have to fit
into memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.store import Store
from pipeline.threads import in_order
from pipeline.traces.format.domain import MOST_STEP, check_names, check_number, shown
from pipeline.traces.format.header import Header, TraceFile, read_header
from pipeline.traces.format.ids import check_once, named
from pipeline.traces.format.parquet import OpenFile, open_file
from pipeline.traces.format.schema import MANIFEST
from pipeline.traces.format.types import Provenance, TraceError, check_array

NO_REWARD = "no reward"
"""The recorded reason for not training on a sample whose reward function failed."""
BASELINE = "greedy baseline"
"""The recorded reason for not training on a sample whose reward is its group's baseline."""

_BATCH_BYTES = 64 << 20
_BATCH_SAMPLES = 256
_TOKEN_BYTES = 16
"""Upper estimate of the memory of a token id, its log-prob and its mask."""


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
    files: tuple[TraceFile, ...]
    """The data files, to which the rows refer by number."""
    rows: pa.Table
    """One row per sample, for all or some samples of the step (columns: schema.MANIFEST)."""
    policies: Mapping[int, str] | None = None
    """Weights digests, keyed by policy version; None if unknown."""
    training: bool = False
    """Whether the trainer records the routes of this step (R2), in separate files."""
    rejected: tuple[Rejected, ...] = ()
    """Groups that were generated but not accepted; their samples have no rows."""
    sha256: str = ""
    """Digest of the content of manifest.json; empty if the step is not sealed."""
    run: str | None = None
    """Digest of the run's description; None outside a run."""

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
    shards: int
    """The number of rollout shards that the step was sealed with; 0 for a replayed step."""
    _cache: list[OpenFile] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.file.rows

    @property
    def _opened(self) -> OpenFile:
        # In Python 3.11, all instances share the lock of a cached_property, and this one reads.
        if not self._cache:
            self._cache.append(open_file(self.store, self.file))
        return self._cache[0]

    def columns(self, names: Iterable[str]) -> pa.Table:
        """Read some columns of all rows. Only the bytes of these columns are fetched.

        The column `group` is returned as a dictionary column, because its strings repeat. Raises
        TraceError for a column that is unknown or named twice, and the same errors as
        `read_manifest`.
        """
        table = self._opened.read(self._fields(names))
        if "group" in table.column_names:
            at = table.column_names.index("group")
            table = table.set_column(at, "group", table["group"].dictionary_encode())
        return table

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
        group_N = self._opened.groups_of(wanted)
        firsts = self._opened.first_rows

        def rows_in(group: int) -> pa.Table:
            rows = wanted[group_N == group] - firsts[group]
            return self._opened.read(MANIFEST, [group]).take(pa.array(rows))

        # A large step's rows would not fit into memory together.
        tables = in_order(rows_in, np.unique(group_N).tolist(), at_once=4)
        table = pa.concat_tables([MANIFEST.empty_table(), *tables])
        places = np.argsort(np.argsort(group_N, kind="stable"))
        return replace(self.head, rows=table.take(pa.array(places)).combine_chunks())

    def all(self) -> Manifest:
        """Read every row. Raises the same errors as `read_manifest`."""
        return replace(self.head, rows=self._opened.read(MANIFEST).combine_chunks())

    def batches(self, names: Iterable[str]) -> Iterator[pa.Table]:
        """Read some columns of all rows, one row group at a time. Raises errors like `columns`."""
        schema = self._fields(names)
        for group in range(self._opened.row_groups):
            yield self._opened.read(schema, [group])

    def _fields(self, names: Iterable[str]) -> pa.Schema:
        where = f"step {self.head.step}: columns"
        wanted = check_names(names, where)
        if unknown := [name for name in wanted if name not in MANIFEST.names]:
            raise TraceError(
                f"{where}: no column {shown(unknown[0])}, expected columns of {MANIFEST.names}"
            )
        check_once(where, wanted)
        return pa.schema([MANIFEST.field(name) for name in wanted])


class _Stored(msgspec.Struct):
    """The JSON form of what a manifest has in addition to a header."""

    policy_versions: tuple[int, ...]
    data: tuple[TraceFile, ...]
    shards: int
    training: bool
    rejected: tuple[Rejected, ...]


def open_manifest(store: Store, step: int) -> SealedManifest:
    """Open a sealed step without reading its rows. Raises the same errors as `read_manifest`."""
    step = check_number(step, MOST_STEP, "step")
    header = read_header(store, keys.manifest(step), {"step": step})
    name = f"{header.key} in {store.uri}"
    try:
        stored = msgspec.convert(header.body, _Stored)
    except msgspec.ValidationError as error:
        raise TraceError(f"{name}: {error}; remake the object") from error
    head = Manifest(
        step,
        stored.policy_versions,
        header.geometry,
        header.provenance,
        stored.data,
        MANIFEST.empty_table(),
        policies=header.policies,
        training=stored.training,
        rejected=stored.rejected,
        sha256=header.sha256,
        run=header.run,
    )
    return SealedManifest(store, head, _rows_file(header), stored.shards)


def _rows_file(header: Header) -> TraceFile:
    if len(header.files) != 1:
        raise TraceError(f"{header.key}: {len(header.files)} files of rows, expected one")
    return header.files[0]


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


def sealed_steps(store: Store) -> list[int]:
    """Return the steps that have a manifest, in ascending order."""
    found = [(info.key, keys.number_of(info.key)) for info in store.list(keys.steps())]
    return [step for key, step in found if step is not None and key == keys.manifest(step)]


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
