"""Parquet files whose commits contain a digest of every column chunk.

A reader fetches the byte ranges of the columns and row groups that it needs, and checks each range
against its digest. pyarrow then decodes only the checked bytes: reading other bytes raises an
error.
"""

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.errors import cut
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, DataFile, parse_file, sha256
from pipeline.run.parse import field, listed, mapping, number, text
from pipeline.store import ObjectMissingError, Store, StoreError
from pipeline.traces.format.checked_bytes import CheckedBytes
from pipeline.traces.format.codec import row_bytes
from pipeline.traces.format.columns import check_columns, has_null
from pipeline.traces.format.pages import (
    StoredChunk,
    StoredGroup,
    check_pages,
    check_texts,
    footer_metadata,
    page_bytes,
    stored_chunks,
)
from pipeline.traces.format.schema import Role, absent_columns, check_metadata, layer_column
from pipeline.traces.format.types import TraceError

TAIL = 8  # bytes at the end of a file: the footer's length (4), then the magic bytes (4)


class Range(NamedTuple):
    """A byte range of a file. Example: Range(offset=4, length=2113, sha256='9f86...').

    Ranges are tuples, which are small and quick to create, because the commits of a large step
    describe millions of ranges.
    """

    offset: int
    length: int
    sha256: str


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file."""

    rows: int
    chunks: tuple[Range, ...]
    """One chunk per leaf column, in the order of TraceFile.leaves."""


@dataclass(frozen=True)
class TraceFile:
    """A Parquet file as described in its commit."""

    data: DataFile
    role: str
    """A Role, or a role from a later minor version. Readers skip files with an unknown role."""
    footer: Range
    leaves: tuple[str, ...]
    """Paths of the leaf columns, such as 'id' and 'prompt_tokens.list.element'."""
    row_groups: tuple[RowGroup, ...]

    @property
    def rows(self) -> int:
        """The number of rows in the file."""
        return sum(group.rows for group in self.row_groups)

    @cached_property
    def first_rows(self) -> npt.NDArray[np.int64]:
        """The first row of each row group, followed by the number of rows in the file."""
        return np.cumsum([0, *(group.rows for group in self.row_groups)])

    def groups_of(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the index of the row group that contains each of the given rows.

        Raises TraceError for a row that the file does not have.
        """
        wanted = np.asarray(rows, np.int64)
        if np.count_nonzero(beyond := (wanted < 0) | (wanted >= self.rows)):
            raise TraceError(
                f"{self.data.key}: row {wanted[beyond][0]}, expected 0..{self.rows - 1}"
            )
        return np.searchsorted(self.first_rows, wanted, side="right") - 1

    @property
    def ranges(self) -> list[Range]:
        """All ranges that have a digest."""
        return [chunk for group in self.row_groups for chunk in group.chunks] + [self.footer]

    def to_json(self) -> dict[str, Any]:
        """Return the file's entry in a commit."""
        return {
            **asdict(self.data),
            "role": self.role,
            "footer": _range_json(self.footer),
            "leaves": list(self.leaves),
            "row_groups": [
                {"rows": group.rows, "chunks": [_range_json(chunk) for chunk in group.chunks]}
                for group in self.row_groups
            ],
        }


def trace_files(body: Mapping[str, Any], name: str) -> tuple[TraceFile, ...]:
    """Parse the files that a commit lists. Raises TraceError if the list is malformed."""
    try:
        return tuple(field(body, "files", listed(_trace_file)))
    except ValueError as error:
        raise TraceError(f"{name}: {error}; remake the object") from error


def _trace_file(value: Any) -> TraceFile:
    body = mapping(value)
    data = parse_file(body)
    size = data.size
    leaves = field(body, "leaves", listed(text))
    groups = field(body, "row_groups", listed(lambda group: _row_group(group, len(leaves), size)))
    footer = field(body, "footer", lambda range: _range(range, size))
    return TraceFile(data, field(body, "role", text), footer, tuple(leaves), tuple(groups))


def _row_group(value: Any, leaves: int, size: int) -> RowGroup:
    body = mapping(value)
    chunks = field(body, "chunks", listed(lambda range: _range(range, size)))
    if len(chunks) != leaves:
        raise ValueError(f"chunks: {len(chunks)} items, expected {leaves}: one per leaf column")
    return RowGroup(field(body, "rows", number), tuple(chunks))


def _range(value: Any, size: int) -> Range:
    if not isinstance(value, list) or len(value) != 3:
        raise ValueError(f"{cut(value)}, expected an offset, a length and a digest")
    found = Range(number(value[0]), number(value[1]), text(value[2]))
    if found.offset + found.length > size:
        raise ValueError(
            f"bytes {found.offset}..{found.offset + found.length}, expected at most {size}"
        )
    return found


def read_table(
    store: Store,
    file: TraceFile,
    schema: pa.Schema,
    row_groups: Sequence[int] | None = None,
    geometry: Geometry | None = None,
    footer: bytes | None = None,
) -> pa.Table:
    """Read some columns of some row groups.

    Only the byte ranges of these columns are fetched, and each range is checked. Columns that were
    introduced after the file's minor version are null.

    Args:
        store: The store that contains the file.
        file: The file as described in its commit.
        schema: Columns to read, with their expected types.
        row_groups: Row groups to read, in this order; None reads all.
        geometry: Geometry that a routes file must have; None skips this check.
        footer: Checked footer from `read_footer`, for repeated reads; None fetches the footer.

    Raises:
        ObjectMissingError: The file is not in the store.
        CorruptObjectError: The file's size or a digest differs from the commit.
        TraceError: The file's role, format, geometry or column types are not as expected.
    """
    return open_groups(store, file, schema, row_groups, geometry, footer).table(schema)


@dataclass(frozen=True)
class OpenedGroups:
    """Row groups of a file, with some columns fetched and checked, but not yet decoded."""

    file: TraceFile
    name: str
    """Key of the file and URI of its store, for error messages."""
    row_groups: Sequence[int]
    metadata: pq.FileMetaData
    chunks: Sequence[Sequence[StoredChunk]]
    """The footer's entries for all chunks of the file: `chunks[row group][leaf column]`."""
    absent: Sequence[str]
    """Requested columns that were introduced after the file's minor version."""
    checked: CheckedBytes
    texts: tuple[list[str], int]
    """Result of `check_pages`."""

    @property
    def coding(self) -> str | None:
        """The coding of the file's sets; None if the file's metadata does not name a coding."""
        found = (self.metadata.metadata or {}).get(b"retrace.coding")
        return None if found is None else found.decode()

    def table(self, schema: pa.Schema) -> pa.Table:
        """Decode fetched columns. Raises TraceError if their content violates the schema."""
        doubtful, most = self.texts
        there = [column for column in schema.names if column not in self.absent]
        doubtful = [path for path in doubtful if path.split(".")[0] in there]
        try:
            with pq.ParquetFile(
                self.checked, metadata=self.metadata, pre_buffer=False, read_dictionary=doubtful
            ) as parquet:
                # A row group without rows has data offset 0, where pyarrow would look for a page.
                full = [g for g in self.row_groups if self.file.row_groups[g].rows]
                table = parquet.read_row_groups(full, columns=there, use_threads=False)
            check_texts(table, doubtful, most, self.name)
            for column in schema.names:
                if column in self.absent:
                    nulls = pa.nulls(len(table), schema.field(column).type)
                    table = table.append_column(column, nulls)
            table = table.select(schema.names)
            for expected in schema:
                if not expected.nullable and table[expected.name].null_count:
                    raise self._has_null(expected.name)
            table = table.cast(schema)  # rejects other types
            table.validate(full=True)  # strings are UTF-8, list offsets are in bounds
        except _DECODING as error:
            raise _unexpected(self.name, error) from error
        for column, chunk in ((n, chunk) for n in schema.names for chunk in table[n].chunks):
            if has_null(chunk):
                raise self._has_null(column, " in a list or group")
        return table

    def _has_null(self, column: str, where: str = "") -> TraceError:
        return TraceError(
            f"{self.name}: its column {column} contains null{where}, expected none; remake the file"
        )

    def page_bytes(self, group: int, column: str) -> memoryview | None:
        """Return the content of a fetched column chunk; see `pages.page_bytes`."""
        leaf = self.file.leaves.index(column)
        described = self.chunks[group][leaf]
        return page_bytes(described, self.checked.at(described.offset))


_DECODING = (pa.ArrowException, OSError, ValueError, KeyError, RecursionError)
"""Exceptions that pyarrow raises for malformed files."""


def open_groups(
    store: Store,
    file: TraceFile,
    schema: pa.Schema,
    row_groups: Sequence[int] | None = None,
    geometry: Geometry | None = None,
    footer: bytes | None = None,
) -> OpenedGroups:
    """Fetch and check the row groups that `read_table` decodes.

    Args:
        store: The store that contains the file.
        file: The file as described in its commit.
        schema: Columns to fetch, with their expected types.
        row_groups: Row groups to fetch, in this order; None fetches all.
        geometry: Geometry that a routes file must have; None skips this check.
        footer: Checked footer from `read_footer`, for repeated reads; None fetches the footer.

    Raises:
        ObjectMissingError: The file is not in the store.
        CorruptObjectError: The file's size or a digest differs from the commit.
        TraceError: The file's role, format, geometry or column types are not as expected.
    """
    name = f"{file.data.key} in {store.uri}"
    wanted = list(range(len(file.row_groups))) if row_groups is None else list(row_groups)
    known = {leaf.split(".")[0] for leaf in file.leaves}
    ranges = column_ranges(file, schema.names, wanted)
    checked = _fetch(store, file, ranges if footer else [*ranges, file.footer])
    try:
        footer = footer or checked.at(file.footer.offset)
        metadata = _parsed(footer, file, name)
        minor = check_metadata(metadata.metadata, file.role, geometry, name)
        absent = absent_columns(schema.names, known, minor, name)
        there = [column for column in schema.names if column not in absent]
        check_columns(metadata, schema, name)
        found = [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)]
        if found != [group.rows for group in file.row_groups]:
            raise TraceError(
                f"{name}: row groups of {found} rows, expected the numbers in the file's commit"
            )
        groups = _stored_groups(file, there, wanted, checked)
        texts = check_pages(metadata, footer, groups, _coded_bytes(there, geometry), name)
        chunks = stored_chunks(footer, metadata.num_columns)
        return OpenedGroups(file, name, wanted, metadata, chunks, absent, checked, texts)
    except _DECODING as error:
        raise _unexpected(name, error) from error


def _parsed(footer: bytes, file: TraceFile, name: str) -> pq.FileMetaData:
    try:
        return footer_metadata(footer, len(file.row_groups), file.leaves)
    except _DECODING as error:
        text = " ".join(str(error).split())  # pyarrow ends some messages with a line feed
        raise TraceError(f"{name}: its footer cannot be read: {text}; remake the file") from error


def _unexpected(name: str, error: Exception) -> TraceError:
    return TraceError(f"{name}: its columns are not as expected: {error}")


def column_ranges(
    file: TraceFile, columns: Collection[str], row_groups: Sequence[int]
) -> list[Range]:
    """Return the byte ranges of some columns of some row groups.

    Args:
        file: The file as described in its commit.
        columns: Names of top-level columns; all their leaf columns are included.
        row_groups: Indices of row groups.

    Returns:
        The ranges of each row group, in the order of `row_groups`: one range per leaf column.
    """
    leaves = [i for i, leaf in enumerate(file.leaves) if leaf.split(".")[0] in columns]
    return [file.row_groups[g].chunks[i] for g in row_groups for i in leaves]


def _stored_groups(
    file: TraceFile, columns: Collection[str], row_groups: Sequence[int], checked: CheckedBytes
) -> list[StoredGroup]:
    leaves = [i for i, leaf in enumerate(file.leaves) if leaf.split(".")[0] in columns]
    found = []
    for g in row_groups:
        chunks = file.row_groups[g].chunks
        read = {i: (chunks[i].offset, checked.at(chunks[i].offset)) for i in leaves}
        found.append(StoredGroup(g, sum(chunk.length for chunk in chunks), read))
    return found


def _coded_bytes(columns: Collection[str], geometry: Geometry | None) -> int:
    """Return how many bytes per row the coded sets in some columns take."""
    if geometry is None:
        return 0
    # If every segment has only one row, each row also needs 4 bytes for its segment's length, and
    # the 8 bytes that the bounds add for each value.
    width = row_bytes(geometry.topk, geometry.experts) + 12
    return width * len({layer_column(layer) for layer in geometry.layers} & {*columns})


def read_footer(store: Store, file: TraceFile) -> bytes:
    """Read and check a file's footer. Raises the same errors as `read_table`."""
    return _fetch(store, file, [file.footer]).at(file.footer.offset)


def describe(content: bytes, data: DataFile, role: Role) -> TraceFile:
    """Describe a Parquet file from its trusted content.

    Args:
        content: The entire file.
        data: Key, size and digest of the file.
        role: The file's role in its commit.

    Returns:
        The file's description, with digests of the footer and of each column chunk.
    """
    return describe_stream(io.BytesIO(content), data, role)


def describe_stream(content: IO[bytes], data: DataFile, role: Role) -> TraceFile:
    """Describe a Parquet file like `describe`, but read its content from a seekable stream.

    Args:
        content: The entire file.
        data: Key, size and digest of the file.
        role: The file's role in its commit.
    """

    def range_of(offset: int, length: int) -> Range:
        content.seek(offset)
        return Range(offset, length, sha256(content.read(length)))

    metadata = pq.read_metadata(content)
    content.seek(data.size - TAIL)
    length = int.from_bytes(content.read(TAIL)[:-4], "little") + TAIL
    content.seek(data.size - length)
    groups, leaves = [], tuple(metadata.schema.column(i).path for i in range(metadata.num_columns))
    for g, chunks in enumerate(stored_chunks(content.read(length), len(leaves))):
        ranges = tuple(range_of(chunk.offset, chunk.length) for chunk in chunks)
        groups.append(RowGroup(metadata.row_group(g).num_rows, ranges))
    return TraceFile(data, role, range_of(data.size - length, length), leaves, tuple(groups))


def _range_json(range_: Range) -> list[Any]:
    return [range_.offset, range_.length, range_.sha256]


def _fetch(store: Store, file: TraceFile, ranges: Sequence[Range]) -> CheckedBytes:
    """Fetch byte ranges and compare each with its digest."""
    ordered = sorted(set(ranges), key=lambda r: r.offset)
    name = f"{file.data.key} in {store.uri}"
    if file.footer.offset + file.footer.length != file.data.size:
        raise TraceError(f"{name}: its commit records a footer that is not at the end")
    pieces = {}
    for range_, piece in zip(ordered, _read_ranges(store, file, ordered), strict=True):
        found = sha256(piece)
        if found != range_.sha256:
            raise CorruptObjectError(
                f"{name}: bytes {range_.offset}..{range_.offset + range_.length} have SHA-256 "
                f"{found[:16]}..., but its commit records {range_.sha256[:16]}...; "
                "restore the object or remake the step"
            )
        pieces[range_.offset] = piece
    return CheckedBytes(file.data.size, pieces)


def _read_ranges(store: Store, file: TraceFile, ranges: Sequence[Range]) -> list[bytes]:
    # The lengths in a commit may be wrong, so the store compares the file's size with the commit
    # before it allocates memory.
    pairs = [(range_.offset, range_.length) for range_ in ranges]
    try:
        return store.read_ranges(file.data.key, pairs, file.data.size)
    except ObjectMissingError as error:
        step = keys.folder_number(file.data.key)
        if step is not None and store.size(pruned := keys.pruned(step)) is not None:
            raise ObjectMissingError(
                f"{file.data.key} in {store.uri}: no such object, because step {step} was pruned "
                f"({pruned}); only its manifest and metrics remain"
            ) from error
        raise
    except StoreError:
        check_size(store, file)
        raise


def check_size(store: Store, file: TraceFile) -> None:
    """Raise an error unless a file exists and has the size that its commit records.

    Raises ObjectMissingError or CorruptObjectError. Does not read the file.
    """
    found = store.size(file.data.key)
    if found is None:
        raise ObjectMissingError(f"read {file.data.key} in {store.uri}: no such object")
    if found != file.data.size:
        raise CorruptObjectError(
            f"{file.data.key} in {store.uri}: {found} bytes, but its commit records "
            f"{file.data.size}; restore the object or remake the step"
        )
