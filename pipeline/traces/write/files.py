"""Writing Parquet files: row group by row group into the store, in bounded memory."""

import hashlib
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Literal, Self, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.model.geometry import Geometry
from pipeline.run.commit import DataFile
from pipeline.store import Store
from pipeline.threads import thread_count
from pipeline.traces.format.chunks import TraceFile, describe_stream
from pipeline.traces.format.schema import Role, file_metadata
from pipeline.traces.format.types import Provenance, TraceError

_UNIQUE = ("token_digest", "routes_digest")
"""Columns without repeated values, which a dictionary would not make smaller."""
Compression = Literal["zstd", "lz4", "none"]
"""zstd: smallest; lz4, none: faster where bytes cost nothing, from process to process."""
_MUCH = 1 << 20
"""Bytes of a row group above which another thread is worth its start."""


class FileWriter:
    """Writes a Parquet file into the store; Upload describes what happens without `finish`.

    A scratch copy stays on the local disk ($TMPDIR) until the end: only the footer, which comes
    last, locates the column chunks whose digests the commit needs.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        role: Role,
        schema: pa.Schema,
        geometry: Geometry | None = None,
        provenance: Provenance | None = None,
        *,
        compression: Compression = "zstd",
    ) -> None:
        if compression not in get_args(Compression):
            raise TraceError(
                f"{key}: compression {compression!r}, expected {get_args(Compression)}"
            )
        metadata = file_metadata(role, geometry, provenance)
        self._key, self._role = key, role
        self.rows = 0
        """Rows written so far."""
        self.upload_s = 0.0
        """Seconds that this writer spent on the store, waiting included."""
        self._sha256 = hashlib.sha256()
        self._thread: ThreadPoolExecutor | None = None
        self._work: Future[None] | None = None
        coded = role == "routes"
        with ExitStack() as opened:
            self._scratch = opened.enter_context(tempfile.TemporaryFile())
            self._upload = opened.enter_context(store.upload(key))
            self._writer = pq.ParquetWriter(
                pa.PythonFile(self, mode="w"),
                schema,
                compression=compression,
                compression_level=1 if compression == "zstd" else None,
                # Coded sets do not repeat and have no useful order.
                use_dictionary=[] if coded else [n for n in schema.names if n not in _UNIQUE],
                write_statistics=not coded,
                # One page per column chunk: a slice is read whole.
                data_page_size=64 << 20,
                # Arrow's own schema would say nothing more, in 1,200 bytes.
                store_schema=False,
            )
            self._writer.add_key_value_metadata(metadata)
            self._opened = opened.pop_all()

    def write_table(self, table: pa.Table) -> None:
        """Append a row group.

        With a second core a large one is compressed, hashed and stored by a thread, while the
        caller prepares the next; an error of it is raised by the next call or by `finish`.
        """
        self._wait()
        self.rows += table.num_rows
        if table.nbytes > _MUCH and thread_count() > 1:
            self._thread = self._thread or ThreadPoolExecutor(1, "trace-file")
            self._work = self._thread.submit(self._write_table, table)
        else:
            self._write_table(table)

    def _write_table(self, table: pa.Table) -> None:
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def _wait(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def write(self, data: bytes) -> int:
        """Accept bytes of the file from pyarrow."""
        piece = bytes(data)
        self._sha256.update(piece)
        self._scratch.write(piece)
        started = time.monotonic()
        self._upload.write(piece)
        self.upload_s += time.monotonic() - started
        return len(piece)

    def finish(self) -> TraceFile:
        """Create the object and describe it for the commit."""
        self._wait()
        self._writer.close()
        started = time.monotonic()
        self._upload.finish()
        self.upload_s += time.monotonic() - started
        data = DataFile(self._key, self._scratch.tell(), self._sha256.hexdigest())
        return describe_stream(self._scratch, data, self._role)

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
        if self._thread is not None:
            self._thread.shutdown()  # what it writes to is closed next
        self._opened.__exit__(kind, error, trace)
