"""Routes files: Parquet, written column chunk by column chunk.

A Parquet library tells where the chunks lie only when the file is complete, so their digests would
take a second look at all bytes, and it copies what it is given several times. Here each chunk has
one page, whose bytes are made, hashed and handed to the store once.

Source of the layout: apache/parquet-format, src/main/thrift/parquet.thrift and Encodings.md.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import pipeline
from pipeline.model.geometry import Geometry
from pipeline.store import Store
from pipeline.traces.format.chunks import Range, RowGroup, TraceFile
from pipeline.traces.format.codec import coding, varint
from pipeline.traces.format.schema import SEGMENT, file_metadata, routes_schema
from pipeline.traces.format.types import Provenance, TraceError
from pipeline.traces.write.files import DigestedUpload, UploadThread
from pipeline.traces.write.thrift import Value, int32, int64, listed, struct, text

Compression = Literal["zstd", "lz4", "none"]
"""zstd: smallest; lz4: faster where bytes cost nothing; none: fastest, from process to process."""
_CODECS = {"none": (0, None), "zstd": (6, ("zstd", 1)), "lz4": (7, ("lz4_raw", None))}
"""Parquet's number of a codec, and its name and level in pyarrow."""
_TYPES = {pa.int32(): 1, pa.string(): 6, pa.binary(): 6}
_PLAIN, _RLE, _DELTA_LENGTH = 0, 3, 6  # encodings
_MAGIC = b"PAR1"


@dataclass(frozen=True)
class Segments:
    """The rows of a row group."""

    owner: Sequence[str]
    token_start: Sequence[int]
    tokens: Sequence[int]
    validity: Sequence[bytes | None]
    pages_LX: npt.NDArray[np.uint8]
    """By layer the content of its page: lengths of the segments, then their coded sets."""


class _Chunk(NamedTuple):
    """A column chunk in the file."""

    range: Range
    whole_bytes: int
    """Of the page with its header, before compression."""


class RoutesFile:
    """Writes a routes file into the store; Upload describes what happens without `finish`."""

    def __init__(
        self,
        store: Store,
        key: str,
        geometry: Geometry,
        provenance: Provenance | None,
        *,
        compression: Compression = "zstd",
    ) -> None:
        if compression not in get_args(Compression):
            raise TraceError(
                f"{key}: compression {compression!r}, expected {get_args(Compression)}"
            )
        self.geometry = geometry
        self.coding = coding(geometry.experts, gaps=compression != "none")
        """Gaps compress better than ids, and are only made to be compressed."""
        self.rows = 0
        """Rows written so far."""
        self._metadata = file_metadata("routes", geometry, provenance, self.coding)
        self._number, codec = _CODECS[compression]
        self._codec = None if codec is None else pa.Codec(*codec)
        self._schema = routes_schema(geometry)
        self._alike = [self._of_all_groups(field) for field in self._schema]
        self._groups: list[tuple[int, list[_Chunk]]] = []
        self._thread = UploadThread()
        with ExitStack() as opened:
            self._upload = opened.enter_context(DigestedUpload(store, key))
            opened.callback(self._thread.close)  # before what it writes to
            self._upload.write(_MAGIC)
            self._opened = opened.pop_all()

    @property
    def upload_s(self) -> float:
        """Seconds that this writer spent on the store, waiting included."""
        return self._upload.upload_s

    def write(self, segments: Segments) -> None:
        """Append a row group.

        With a second core a large one is compressed, hashed and stored by a thread, while the
        caller prepares the next; an error of it is raised by the next call or by `finish`.
        """
        self.rows += len(segments.owner)
        self._thread.submit(lambda: self._write(segments), segments.pages_LX.nbytes)

    def finish(self) -> TraceFile:
        """Create the object and describe it for the commit."""
        self._thread.wait()
        offset = self._upload.size
        footer = self._footer()
        footer += len(footer).to_bytes(4, "little") + _MAGIC
        self._upload.write(footer)
        digest = hashlib.sha256(footer).hexdigest()
        groups = tuple(
            RowGroup(rows, tuple(chunk.range for chunk in chunks)) for rows, chunks in self._groups
        )
        data = self._upload.finish()
        described = Range(offset, len(footer), digest)
        return TraceFile(data, "routes", described, tuple(self._schema.names), groups)

    def _write(self, segments: Segments) -> None:
        n = len(segments.owner)
        known = [bits for bits in segments.validity if bits is not None]
        plain = (
            _texts(segments.owner),
            np.array(segments.token_start, "<i4").tobytes(),
            np.array(segments.tokens, "<i4").tobytes(),
            _levels(segments.validity) + _texts(known),
        )
        chunks = [self._put(content, n, _PLAIN) for content in plain]
        chunks += [self._put(page_X.data, n, _DELTA_LENGTH) for page_X in segments.pages_LX]
        self._groups.append((n, chunks))

    def _put(self, content: bytes | memoryview, values: int, encoding: int) -> _Chunk:
        """Write a column chunk of one page."""
        stored = content if self._codec is None else self._codec.compress(content, asbytes=True)
        whole, size = len(content), len(stored)
        page = {1: int32(values), 2: int32(encoding), 3: int32(_RLE), 4: int32(_RLE)}
        header = struct({1: int32(0), 2: int32(whole), 3: int32(size), 5: struct(page)}).content
        digest = hashlib.sha256(header)
        digest.update(stored)
        offset = self._upload.size
        self._upload.write(header)
        self._upload.write(stored)
        range_ = Range(offset, len(header) + size, digest.hexdigest())
        return _Chunk(range_, len(header) + whole)

    def _footer(self) -> bytes:
        root = struct({4: text("schema"), 5: int32(len(self._schema))})
        pairs = [struct({1: text(key), 2: text(value)}) for key, value in self._metadata.items()]
        return struct(
            {
                1: int32(2),
                2: listed([root, *map(_described, self._schema)]),
                3: int64(self.rows),
                4: listed([self._group(*group) for group in self._groups]),
                5: listed(pairs),
                6: text(f"retrace version {pipeline.__version__}"),
            }
        ).content

    def _of_all_groups(self, field: pa.Field) -> dict[int, Value]:
        """What the footer says of a column in every row group."""
        encoding = _PLAIN if field.name in SEGMENT.names else _DELTA_LENGTH
        return {
            1: int32(_TYPES[field.type]),
            2: listed([int32(encoding), int32(_RLE)]),
            3: listed([text(field.name)]),
            4: int32(self._number),
        }

    def _group(self, rows: int, chunks: Sequence[_Chunk]) -> Value:
        columns = []
        for alike, chunk in zip(self._alike, chunks, strict=True):
            own = {
                **alike,
                5: int64(rows),
                6: int64(chunk.whole_bytes),
                7: int64(chunk.range.length),
                9: int64(chunk.range.offset),
            }
            columns.append(struct({2: int64(0), 3: struct(own)}))
        return struct(
            {
                1: listed(columns),
                2: int64(sum(chunk.whole_bytes for chunk in chunks)),
                3: int64(rows),
                5: int64(chunks[0].range.offset),
                6: int64(sum(chunk.range.length for chunk in chunks)),
            }
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)


def _described(field: pa.Field) -> Value:
    is_text = field.type == pa.string()
    return struct(
        {
            1: int32(_TYPES[field.type]),
            3: int32(int(field.nullable)),
            4: text(field.name),
            6: int32(0) if is_text else None,
            10: struct({1: struct({})}) if is_text else None,
        }
    )


def _texts(values: Sequence[Any]) -> bytes:
    """The encoding PLAIN of texts or bytes."""
    found = [value if isinstance(value, bytes) else value.encode() for value in values]
    return b"".join(part for data in found for part in (len(data).to_bytes(4, "little"), data))


def _levels(values: Sequence[object]) -> bytes:
    """Which values of an optional column are there: one bit each, behind its length."""
    there = np.array([value is not None for value in values])
    if there.all() or not there.any():
        run = varint(len(values) << 1) + bytes([int(there[0])])
    else:
        bits = np.packbits(there, bitorder="little").tobytes()
        run = varint(len(bits) << 1 | 1) + bits
    return len(run).to_bytes(4, "little") + run
