"""Writing Parquet files to the store, row group by row group, in bounded memory."""

import hashlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.run.commit import sha256
from pipeline.store import ObjectExistsError, Store
from pipeline.threads import thread_count
from pipeline.traces.format.header import TraceFile
from pipeline.traces.format.schema import Role
from pipeline.traces.format.types import TraceError

Compression = Literal["zstd", "lz4", "none"]
"""Compression of a routes file. zstd gives the smallest files. lz4 is faster, and suits files whose
size does not matter. none is the fastest, and suits files that one process passes to another."""
_LEVEL = 2
"""The zstd level. Compared with level 3, recorded routes take 2% more bytes, and routes of an
untrained model 4%. At level 3, writing takes 6% to 18% more time."""
_MUCH = 1 << 20
"""Size in bytes above which a thread writes a row group. For a smaller one, a thread would save no
time."""
_TAIL = 8
"""Bytes at the end of a file: the footer's length (4), then the magic bytes (4)."""


class FileWriter:
    """Writes a Parquet file to the store. Leaving the block without `finish` creates no object.

    Args:
        store: The store.
        key: The file's key, which contains a write id that no other writer uses.
        role: The file's role in its commit.
        schema: The file's columns.
        metadata: Key-value metadata of the file.
        dictionary: The columns whose values repeat.
        statistics: The columns by which other tools may skip row groups.
        layers: The MoE layers of a routes file.
        compression: The compression of all columns.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        role: Role,
        schema: pa.Schema,
        metadata: Mapping[str, str],
        *,
        dictionary: list[str],
        statistics: list[str] | None = None,
        layers: tuple[int, ...] = (),
        compression: Compression = "zstd",
    ) -> None:
        if compression not in get_args(Compression):
            raise TraceError(
                f"{key}: compression {compression!r}, expected {get_args(Compression)}"
            )
        self.rows = 0
        """Rows written so far."""
        self.upload_s = 0.0
        """Seconds spent in calls to the store, including waiting."""
        self._key, self._role, self._layers = key, role, layers
        self._sha256 = hashlib.sha256()
        self._size = 0
        self._footer: bytearray | None = None
        self._thread = _Thread()
        with ExitStack() as opened:
            self._upload = opened.enter_context(store.upload(key))
            opened.callback(self._thread.close)  # before the upload that the thread uses ends
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self, mode="w"),
                schema,
                compression=compression,
                compression_level=_LEVEL if compression == "zstd" else None,
                use_dictionary=dictionary,
                write_statistics=statistics or False,
                write_page_checksum=True,
                # Larger pages would take up to a third more time, because zstd's tables would not
                # fit into the processor's cache. Readers fetch entire column chunks.
                data_page_size=256 << 10,
                write_batch_size=1 << 14,
                # Arrow's schema would add 1,200 bytes but no information.
                store_schema=False,
            )
            self._writer.add_key_value_metadata(dict(metadata))
            self._opened = opened.pop_all()

    def write_table(self, table: pa.Table) -> None:
        """Append a row group.

        If there is a second core, a thread compresses, hashes and stores a large row group while
        the caller prepares the next one. The next call to `write_table` or `finish` raises the
        thread's error.
        """
        self.rows += table.num_rows
        self._thread.submit(lambda: self._write_table(table), table.nbytes)

    def _write_table(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def write(self, data: bytes) -> int:
        """Take the bytes that pyarrow writes to the file."""
        piece = bytes(data)
        if self._footer is not None:
            self._footer += piece
        self._sha256.update(piece)
        started = time.monotonic()
        self._upload.write(piece)
        self.upload_s += time.monotonic() - started
        self._size += len(piece)
        return len(piece)

    def finish(self) -> TraceFile:
        """Create the object, and return its description for the commit.

        Raises ObjectExistsError if another writer has used the write id in the key.
        """
        self._thread.wait()
        self._footer = bytearray()
        self._writer.close()
        length = int.from_bytes(self._footer[-_TAIL:-4], "little") + _TAIL
        started = time.monotonic()
        try:
            self._upload.finish()
        except ObjectExistsError as error:
            raise ObjectExistsError(
                f"{error}; each write id is used only once, so write again under a new one "
                "(new_write_id())"
            ) from error
        self.upload_s += time.monotonic() - started
        return TraceFile(
            key=self._key,
            size=self._size,
            sha256=self._sha256.hexdigest(),
            role=self._role,
            rows=self.rows,
            footer_size=length,
            footer_sha256=sha256(bytes(self._footer[-length:])),
            layers=self._layers,
        )

    # pyarrow requires a file to have `closed` and `flush`. Only `finish` and `__exit__` close this
    # file.
    closed = False

    def flush(self) -> None:
        """Do nothing: no bytes are buffered here."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)


class _Thread:
    """Executes one task at a time, in the background if there is a second core."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None

    def submit(self, work: Callable[[], None], size: int) -> None:
        """Execute a task that processes `size` bytes. Raises the previous task's error."""
        self.wait()
        if size > _MUCH and thread_count() > 1:
            self._pool = self._pool or ThreadPoolExecutor(1, "trace-file")
            self._work = self._pool.submit(work)
        else:
            work()

    def wait(self) -> None:
        """Wait for the last task. Raises the task's error."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        """End the thread."""
        if self._pool is not None:
            self._pool.shutdown()
