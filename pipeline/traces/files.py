"""Writing Parquet files: row group by row group into the store, in bounded memory."""

import hashlib
import io
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import IO, Self

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.store import Store
from pipeline.store.commit import DataFile, sha256
from pipeline.traces.chunks import TAIL, Range, RowGroup, TraceFile
from pipeline.traces.records import Geometry, Provenance
from pipeline.traces.schema import Role, file_metadata

_UNIQUE = ("token_digest", "routes_digest")
"""Columns without a value that comes twice: a dictionary of them is only work."""


class FileWriter:
    """A Parquet file on its way into the store; see Upload for what becomes of it without finish.

    A scratch copy on the local disk ($TMPDIR) is kept until the end: which column chunk lies where,
    and so what their digests are, only the footer says.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        role: Role,
        schema: pa.Schema,
        geometry: Geometry | None = None,
        provenance: Provenance | None = None,
    ) -> None:
        schema = schema.with_metadata(file_metadata(role, geometry, provenance))
        self._key, self._role = key, role
        self.rows = 0
        """Written until now."""
        self.upload_s = 0.0
        """Seconds that the store took, or made this writer wait."""
        self._sha256 = hashlib.sha256()
        coded = role == "routes"
        with ExitStack() as opened:
            self._scratch = opened.enter_context(tempfile.TemporaryFile())
            self._upload = opened.enter_context(store.upload(key))
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self, mode="w"),
                schema,
                compression="zstd",
                compression_level=1,
                # Coded sets neither repeat as wholes nor have a useful order.
                use_dictionary=[] if coded else [n for n in schema.names if n not in _UNIQUE],
                write_statistics=not coded,
                # One page per column chunk: a slice is read whole.
                data_page_size=64 << 20,
            )
            self._opened = opened.pop_all()

    def write_table(self, table: pa.Table) -> None:
        """Append a row group."""
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))
        self.rows += table.num_rows

    def write(self, data: bytes) -> int:
        """Take bytes of the file from pyarrow."""
        piece = bytes(data)
        self._sha256.update(piece)
        self._scratch.write(piece)
        started = time.monotonic()
        self._upload.write(piece)
        self.upload_s += time.monotonic() - started
        return len(piece)

    def finish(self) -> TraceFile:
        """Create the object and describe it for the commit."""
        self._writer.close()
        started = time.monotonic()
        self._upload.finish()
        self.upload_s += time.monotonic() - started
        data = DataFile(self._key, self._scratch.tell(), self._sha256.hexdigest())
        return _describe(self._scratch, data, self._role)

    # What pyarrow asks of a file; it is neither flushed nor closed before `finish` or `__exit__`.
    closed = False

    def flush(self) -> None:
        """Nothing is held back here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)


def write_file(
    store: Store,
    key: str,
    role: Role,
    tables: Iterable[pa.Table],
    schema: pa.Schema,
    geometry: Geometry | None = None,
    provenance: Provenance | None = None,
) -> TraceFile:
    """Write tables as the row groups of a Parquet file and describe it for the commit."""
    with FileWriter(store, key, role, schema, geometry, provenance) as writer:
        for table in tables:
            writer.write_table(table)
        return writer.finish()


def describe(content: bytes, data: DataFile, role: Role) -> TraceFile:
    """Digests of the parts of a Parquet file whose content is known to be good."""
    return _describe(io.BytesIO(content), data, role)


def _describe(content: IO[bytes], data: DataFile, role: Role) -> TraceFile:
    def range_of(offset: int, length: int) -> Range:
        content.seek(offset)
        return Range(offset, length, sha256(content.read(length)))

    metadata = pq.read_metadata(content)
    content.seek(data.size - TAIL)
    length = int.from_bytes(content.read(TAIL)[:-4], "little") + TAIL
    groups, leaves = [], tuple(metadata.schema.column(i).path for i in range(metadata.num_columns))
    for g in range(metadata.num_row_groups):
        group, chunks = metadata.row_group(g), []
        for i in range(metadata.num_columns):
            column = group.column(i)
            start = column.data_page_offset
            if column.has_dictionary_page:
                start = min(start, column.dictionary_page_offset)
            chunks.append(range_of(start, column.total_compressed_size))
        groups.append(RowGroup(group.num_rows, tuple(chunks)))
    return TraceFile(data, role, range_of(data.size - length, length), leaves, tuple(groups))
