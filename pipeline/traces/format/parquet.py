"""Reading ranges of Parquet files in a store.

A file's commit contains the length and digest of its Parquet footer. The footer locates the column
chunks, and each of their pages has a checksum, which pyarrow compares. Together they guard every
byte that is decoded, although only a part of the file is fetched.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, DataFile, read_data, sha256
from pipeline.store import ObjectMissingError, Store, StoreError, UnreadableError
from pipeline.threads import thread_count
from pipeline.traces.format.header import TraceFile
from pipeline.traces.format.schema import check_format
from pipeline.traces.format.types import TraceError

_SMALL = 1 << 20
"""Size in bytes up to which a file is fetched whole, because one request is faster than two."""
_MUCH = 1 << 20
"""Size in bytes from which several threads decode columns."""
_UNREADABLE = (pa.ArrowException, OSError, ValueError, KeyError)
"""Exceptions that pyarrow raises for damaged files."""


@dataclass(frozen=True)
class OpenFile:
    """A Parquet file whose footer was read and checked."""

    store: Store
    key: str
    size: int
    metadata: pq.FileMetaData
    content: bytes | None
    """The whole file, if it is small."""

    @property
    def name(self) -> str:
        """The file, for messages."""
        return f"{self.key} in {self.store.uri}"

    @property
    def row_groups(self) -> int:
        """The number of row groups."""
        return int(self.metadata.num_row_groups)

    @cached_property
    def first_rows(self) -> npt.NDArray[np.int64]:
        """The first row of each row group, followed by the number of rows in the file."""
        rows = [self.metadata.row_group(g).num_rows for g in range(self.row_groups)]
        return np.cumsum([0, *rows])

    @cached_property
    def starts(self) -> list[int]:
        """The same numbers as a list, in which a single row is found faster."""
        found: list[int] = self.first_rows.tolist()
        return found

    @cached_property
    def columns(self) -> dict[str, list[int]]:
        """The leaf columns of each column."""
        found: dict[str, list[int]] = {}
        for i in range(self.metadata.num_columns):
            found.setdefault(self.metadata.schema.column(i).path.split(".")[0], []).append(i)
        return found

    def groups_of(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the index of the row group that contains each of the given rows.

        Raises TraceError for a row that the file does not have.
        """
        wanted, end = np.asarray(rows, np.int64), self.first_rows[-1]
        if np.count_nonzero(beyond := (wanted < 0) | (wanted >= end)):
            raise TraceError(f"{self.name}: row {wanted[beyond][0]}, expected 0..{end - 1}")
        return np.searchsorted(self.first_rows, wanted, side="right") - 1

    def group_of(self, row: int) -> int:
        """Return the index of the row group that contains a row. Raises like `groups_of`."""
        if not 0 <= row < self.starts[-1]:
            raise TraceError(f"{self.name}: row {row}, expected 0..{self.starts[-1] - 1}")
        return bisect_right(self.starts, row) - 1

    def ranges(self, columns: Iterable[str], row_groups: Iterable[int]) -> list[tuple[int, int]]:
        """Return offset and length in bytes of each column chunk of some columns and row groups."""
        leaves = [leaf for column in columns for leaf in self.columns[column]]
        found = []
        for g in row_groups:
            group = self.metadata.row_group(g)
            for leaf in leaves if group.num_rows else ():
                chunk = group.column(leaf)
                start = chunk.dictionary_page_offset or chunk.data_page_offset
                found.append((start, chunk.total_compressed_size))
        return found

    def bytes_of(self, columns: Iterable[str], row_groups: Iterable[int]) -> int:
        """Return the stored size in bytes of some columns of some row groups."""
        return sum(length for _, length in self.ranges(columns, row_groups))

    def read(self, schema: pa.Schema, row_groups: Sequence[int] | None = None) -> pa.Table:
        """Fetch and decode some columns of some row groups.

        Args:
            schema: Columns to read, with their expected types.
            row_groups: Row groups to read, in this order; None reads all.

        Raises:
            ObjectMissingError: The file was removed.
            CorruptObjectError: A fetched byte is damaged.
            TraceError: The file has no such column, or its type is another one.
        """
        wanted = range(self.row_groups) if row_groups is None else row_groups
        if missing := [name for name in schema.names if name not in self.columns]:
            raise TraceError(f"{self.name}: no column {missing[0]}; found {sorted(self.columns)}")
        ranges = self.ranges(schema.names, wanted)
        much = sum(length for _, length in ranges) > _MUCH
        try:
            with pq.ParquetFile(
                self._source(ranges), metadata=self.metadata, page_checksum_verification=True
            ) as parquet:
                threads = much and thread_count() > 1
                full = [g for g in wanted if self.metadata.row_group(g).num_rows]
                table = parquet.read_row_groups(full, list(schema.names), use_threads=threads)
        except _UNREADABLE as error:
            raise _damaged(self.name, error) from error
        return _typed(table, schema, self.name)

    def _source(self, ranges: Sequence[tuple[int, int]]) -> pa.BufferReader:
        if self.content is not None:
            return pa.BufferReader(self.content)
        # Only the fetched ranges of this array are ever touched, so the rest takes no memory.
        whole = np.zeros(self.size, np.uint8)
        for (offset, length), piece in zip(ranges, self._fetch(ranges), strict=True):
            whole[offset : offset + length] = np.frombuffer(piece, np.uint8)
        return pa.BufferReader(pa.py_buffer(whole))

    def _fetch(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return _ranges(self.store, self.key, ranges, self.size)


def open_file(store: Store, file: TraceFile) -> OpenFile:
    """Read and check a file's footer.

    Raises:
        ObjectMissingError: The file is not in the store.
        CorruptObjectError: Its size or its footer differ from the commit.
        TraceError: It has another role or major version than its commit records.
    """
    name = f"{file.key} in {store.uri}"
    content = None
    if file.size <= _SMALL:
        try:
            content = read_data(store, file.data)
        except ObjectMissingError as error:
            raise _pruned(store, file.key) or error from error
        footer = content[file.size - file.footer_size :]
    else:
        start = file.size - file.footer_size
        (footer,) = _ranges(store, file.key, [(start, file.footer_size)], file.size)
    if (found := sha256(footer)) != file.footer_sha256:
        raise CorruptObjectError(
            f"{name}: its footer has SHA-256 {found[:16]}..., but its commit records "
            f"{file.footer_sha256[:16]}...; restore the object or remake the step"
        )
    metadata = _parsed(footer, name)
    pairs = metadata.metadata or {}
    role = pairs.get(b"retrace.role", b"").decode()
    check_format(pairs.get(b"retrace.format", b"").decode(), name)
    if role != file.role or metadata.num_rows != file.rows:
        raise TraceError(
            f"{name}: a {role} file of {metadata.num_rows} rows, but its commit records a "
            f"{file.role} file of {file.rows}; remake the step"
        )
    return OpenFile(store, file.key, file.size, metadata, content)


def read_whole(store: Store, file: DataFile, schema: pa.Schema) -> pa.Table:
    """Read some columns of a whole file, which is compared with its digest.

    Args:
        store: The store that contains the file.
        file: Key, size and digest of the file.
        schema: Columns to read, with their expected types.

    Raises:
        ObjectMissingError: The file is not in the store.
        CorruptObjectError: The file is damaged.
        TraceError: The file has other columns.
    """
    content = read_data(store, file)
    name = f"{file.key} in {store.uri}"
    try:
        table = pq.read_table(pa.BufferReader(content), columns=list(schema.names))
    except _UNREADABLE as error:
        raise _damaged(name, error) from error
    return _typed(table, schema, name)


def _parsed(footer: bytes, name: str) -> pq.FileMetaData:
    try:
        return pq.read_metadata(pa.BufferReader(b"PAR1" + footer))
    except _UNREADABLE as error:
        raise _damaged(name, error) from error


def _typed(table: pa.Table, schema: pa.Schema, name: str) -> pa.Table:
    """Return a table with exactly the schema's columns and types. Raises TraceError."""
    if table.schema.equals(schema):
        return table
    try:
        table = table.select(schema.names).cast(schema)
    except _UNREADABLE as error:
        raise TraceError(f"{name}: its columns are not as expected: {error}") from error
    return table


def _damaged(name: str, error: Exception) -> CorruptObjectError:
    text = " ".join(str(error).split())  # pyarrow ends some messages with a line feed
    return CorruptObjectError(f"{name}: {text}; restore the object or remake the step")


def _ranges(store: Store, key: str, ranges: Sequence[tuple[int, int]], size: int) -> list[bytes]:
    try:
        return store.read_ranges(key, ranges, size)
    except ObjectMissingError as error:
        raise _pruned(store, key) or error from error
    except UnreadableError as error:
        raise CorruptObjectError(
            f"{error}: its commit records {size} bytes; restore the object or remake the step"
        ) from error


def _pruned(store: Store, key: str) -> StoreError | None:
    """Return the error for a file of a pruned step; None if its step was not pruned."""
    step = keys.folder_number(key)
    if step is None or store.size(pruned := keys.pruned(step)) is None:
        return None
    return ObjectMissingError(
        f"{key} in {store.uri}: no such object, because step {step} was pruned ({pruned}); only "
        "its manifest and metrics remain"
    )
