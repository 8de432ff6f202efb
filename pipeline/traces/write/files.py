"""Writing Parquet files: row group by row group into the store, in bounded memory."""

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
from pipeline.store import Store
from pipeline.threads import thread_count
from pipeline.traces.format.chunks import TraceFile, describe_stream
from pipeline.traces.format.schema import Role, file_metadata

_UNIQUE = ("token_digest", "routes_digest")
"""Columns without repeated values, which a dictionary would not make smaller."""
_MUCH = 1 << 20
"""Bytes of a row group above which another thread is worth its start."""


class DigestedUpload:
    """An object in the making, and the digest of its bytes."""

    def __init__(self, store: Store, key: str) -> None:
        self.size = 0
        """Bytes written so far."""
        self.upload_s = 0.0
        """Seconds spent on the store, waiting included."""
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
        """Create the object."""
        started = time.monotonic()
        self._upload.finish()
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
    """Does one thing at a time, behind the caller's back where there is a second core."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None

    def submit(self, work: Callable[[], None], size: int) -> None:
        """Do work on so many bytes; raises the error of the work before."""
        self.wait()
        if size > _MUCH and thread_count() > 1:
            self._thread = self._thread or ThreadPoolExecutor(1, "trace-file")
            self._work = self._thread.submit(work)
        else:
            work()

    def wait(self) -> None:
        """Wait for the last work; raises its error."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()


class FileWriter:
    """Writes a Parquet file into the store; Upload describes what happens without `finish`.

    A scratch copy stays on the local disk ($TMPDIR) until the end: only the footer, which comes
    last, locates the column chunks whose digests the commit needs. Routes, which are much larger,
    have a writer of their own (RoutesFile).
    """

    def __init__(self, store: Store, key: str, role: Role, schema: pa.Schema) -> None:
        self._role = role
        self.rows = 0
        """Rows written so far."""
        self._thread = UploadThread()
        with ExitStack() as opened:
            self._scratch = opened.enter_context(tempfile.TemporaryFile())
            self._upload = opened.enter_context(DigestedUpload(store, key))
            opened.callback(self._thread.close)  # before what it writes to
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self, mode="w"),
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=[name for name in schema.names if name not in _UNIQUE],
                # One page per column chunk: a slice is read whole.
                data_page_size=64 << 20,
                # Arrow's own schema would say nothing more, in 1,200 bytes.
                store_schema=False,
            )
            self._writer.add_key_value_metadata(file_metadata(role, None, None))
            self._opened = opened.pop_all()

    @property
    def upload_s(self) -> float:
        """Seconds that this writer spent on the store, waiting included."""
        return self._upload.upload_s

    def write_table(self, table: pa.Table) -> None:
        """Append a row group.

        With a second core a large one is compressed, hashed and stored by a thread, while the
        caller prepares the next; an error of it is raised by the next call or by `finish`.
        """
        self.rows += table.num_rows
        self._thread.submit(lambda: self._write_table(table), table.nbytes)

    def _write_table(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def write(self, data: bytes) -> int:
        """Accept bytes of the file from pyarrow."""
        piece = bytes(data)
        self._scratch.write(piece)
        self._upload.write(piece)
        return len(piece)

    def finish(self) -> TraceFile:
        """Create the object and describe it for the commit."""
        self._thread.wait()
        self._writer.close()
        return describe_stream(self._scratch, self._upload.finish(), self._role)

    # pyarrow requires `closed` and `flush` of a file; only `finish` and `__exit__` end this one.
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
