"""Writing Parquet files to the store, row group by row group, in bounded memory."""

import hashlib
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.run.commit import DataFile
from pipeline.store import ObjectExistsError, Store
from pipeline.threads import thread_count
from pipeline.traces.format.chunks import TraceFile, describe_stream
from pipeline.traces.format.schema import Role, file_metadata

_UNIQUE = ("token_digest", "routes_digest")
"""Columns without repeated values, for which a dictionary would save no space."""
_MUCH = 1 << 20
"""Size in bytes above which a thread writes a row group. For a smaller one, a thread would save no
time."""


class DigestedUpload:
    """Uploads an object, and also computes the digest of its bytes."""

    def __init__(self, store: Store, key: str) -> None:
        self.size = 0
        """Bytes written so far."""
        self.upload_s = 0.0
        """Seconds spent in calls to the store, including waiting."""
        self._key = key
        self._sha256 = hashlib.sha256()
        self._upload = store.upload(key)

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._sha256.update(data)
        started = time.monotonic()
        self._upload.write(data)
        self.upload_s += time.monotonic() - started
        self.size += len(data)

    def finish(self) -> DataFile:
        """Create the object and return its key, size and digest.

        Raises ObjectExistsError if another writer has used the write id in the key.
        """
        started = time.monotonic()
        try:
            self._upload.finish()
        except ObjectExistsError as error:
            raise ObjectExistsError(
                f"{error}; each write id is used only once, so write again under a new one "
                "(new_write_id())"
            ) from error
        self.upload_s += time.monotonic() - started
        return DataFile(self._key, self.size, self._sha256.hexdigest())

    def __enter__(self) -> Self:
        self._upload.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._upload.__exit__(kind, error, trace)


class UploadThread:
    """Executes one task at a time, in the background if there is a second core."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None

    def submit(self, work: Callable[[], None], size: int) -> None:
        """Execute a task that processes `size` bytes. Raises the previous task's error."""
        self.wait()
        if size > _MUCH and thread_count() > 1:
            self._thread = self._thread or ThreadPoolExecutor(1, "trace-file")
            self._work = self._thread.submit(work)
        else:
            work()

    def wait(self) -> None:
        """Wait for the last task. Raises the task's error."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


class FileWriter:
    """Writes a Parquet file to the store. See Upload for the effect of omitting `finish`.

    A scratch copy remains on the local disk ($TMPDIR) until the file is complete. It is needed
    because the commit contains the digests of the column chunks, and only the footer, which is
    written last, locates the chunks. Routes, which are much larger, have a separate writer
    (RoutesFile).
    """

    def __init__(self, store: Store, key: str, role: Role, schema: pa.Schema) -> None:
        self._role = role
        self.rows = 0
        """Rows written so far."""
        self._thread = UploadThread()
        with ExitStack() as opened:
            self._scratch = opened.enter_context(tempfile.TemporaryFile())
            self._upload = opened.enter_context(DigestedUpload(store, key))
            opened.callback(self._thread.close)  # before the files that the thread uses are closed
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self, mode="w"),
                schema,
                compression="zstd",
                compression_level=1,
                # No reader uses them, and commits have no digests of their meaning.
                write_statistics=False,
                use_dictionary=[name for name in schema.names if name not in _UNIQUE],
                # One page per column chunk, because readers fetch entire chunks.
                data_page_size=64 << 20,
                # Arrow's schema would add 1,200 bytes but no information.
                store_schema=False,
            )
            self._writer.add_key_value_metadata(file_metadata(role, None, None))
            self._opened = opened.pop_all()

    @property
    def upload_s(self) -> float:
        """Seconds that this writer has spent in calls to the store, including waiting."""
        return self._upload.upload_s

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
        """Write the bytes that pyarrow passes to the file."""
        piece = bytes(data)
        self._scratch.write(piece)
        self._upload.write(piece)
        return len(piece)

    def finish(self) -> TraceFile:
        """Create the object, and return its description for the commit."""
        self._thread.wait()
        self._writer.close()
        return describe_stream(self._scratch, self._upload.finish(), self._role)

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
