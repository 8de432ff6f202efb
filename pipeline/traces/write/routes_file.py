"""Writing routes files, in the Parquet format, column chunk by column chunk.

A Parquet library reveals the positions of the chunks only when the file is complete, so computing
their digests would require a second pass over all bytes. A library also copies its input several
times. Here, each chunk has one page, whose bytes are generated, hashed and passed to the store only
once.

Source of the layout: apache/parquet-format, src/main/thrift/parquet.thrift and Encodings.md.
"""

import hashlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

import pipeline
from pipeline.model.geometry import Geometry
from pipeline.store import Store
from pipeline.traces.format.chunks import Range, RowGroup, TraceFile
from pipeline.traces.format.codec import (
    PLANES,
    Coding,
    coding,
    has_gaps,
    ids_bytes,
    in_planes,
    pack,
    row_bytes,
    stored_lengths,
    take_gaps,
    varint,
)
from pipeline.traces.format.planes import encode_planes
from pipeline.traces.format.schema import SEGMENT, file_metadata, routes_schema
from pipeline.traces.format.types import Provenance, TraceError
from pipeline.traces.write.files import DigestedUpload, UploadThread
from pipeline.traces.write.thrift import Value, int32, int64, listed, struct, text

Compression = Literal["zstd", "lz4", "none"]
"""Compression of a routes file. zstd gives the smallest files. lz4 is faster, and suits files whose
size does not matter. none is the fastest, and suits files that one process passes to another."""
_CODECS = {"none": (0, None), "zstd": (6, ("zstd", 1)), "lz4": (7, ("lz4_raw", None))}
"""Parquet's number for each codec, and pyarrow's name and level for it."""
_FEW_ROWS, _TESTED_ROWS = 4_096, 16_384
"""If the first row group has fewer than _FEW_ROWS rows, the file's coding is chosen without a test.
A test uses at most _TESTED_ROWS rows."""
_PLANES_COST = 1.01
"""Planes are used only if they are smaller even after multiplication by this factor, because a
reader of a few segments has to decode the planes of a complete row group."""
_TYPES = {pa.int32(): 1, pa.string(): 6, pa.binary(): 6}
_PLAIN, _RLE, _DELTA_LENGTH = 0, 3, 6  # encodings
_MAGIC = b"PAR1"
_Bytes: TypeAlias = bytes | memoryview


@dataclass(frozen=True)
class Segments:
    """The rows of a row group, which has at least one segment."""

    owner: Sequence[str]
    token_start: Sequence[int]
    tokens: Sequence[int]
    validity: Sequence[bytes | None]
    sets_LNK: npt.NDArray[Any]
    """Ascending sets of all segments in order, in C order. The file overwrites this array."""


class _Chunk(NamedTuple):
    """A column chunk that was written to the file."""

    range: Range
    whole_bytes: int
    """Size in bytes of the page before compression, including its header."""


class RoutesFile:
    """Writes a routes file to the store. See Upload for the effect of omitting `finish`."""

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
        self.rows = 0
        """Rows written so far."""
        self._provenance = provenance
        self._coding: Coding | None = None
        self._number, codec = _CODECS[compression]
        self._codec = None if codec is None else pa.Codec(*codec)
        self._schema = routes_schema(geometry)
        self._groups: list[tuple[int, list[_Chunk]]] = []
        self._thread = UploadThread()
        with ExitStack() as opened:
            self._upload = opened.enter_context(DigestedUpload(store, key))
            opened.callback(self._thread.close)  # before the upload that the thread uses ends
            self._upload.write(_MAGIC)
            self._opened = opened.pop_all()

    @property
    def upload_s(self) -> float:
        """Seconds that this writer has spent in calls to the store, including waiting."""
        return self._upload.upload_s

    def _choose_coding(self, sets_LNK: npt.NDArray[Any]) -> Coding:
        """Return the file's coding.

        Which coding compresses best depends on the model (docs/design.md), so the first rows of a
        layer are compressed with each of them. If there are few rows, gaps are used without
        this test, because the test would take longer than it saves. If the file is not compressed,
        ids are used, because they are faster.

        Args:
            sets_LNK: Sets of the first row group.
        """
        experts = self.geometry.experts
        if self._codec is None:
            return coding(experts, gaps=False)
        if sets_LNK.shape[1] < _FEW_ROWS or not len(sets_LNK):
            return coding(experts)
        sets_NK = sets_LNK[len(sets_LNK) // 2, :_TESTED_ROWS]
        sizes: dict[Coding, int] = {}
        for gaps in (True, False):
            for stored in (coding(experts, gaps=gaps), PLANES[gaps]):
                # A copy, because gaps replace the ids.
                coded = _encoded(sets_NK.copy(), [len(sets_NK)], experts, stored)
                size = len(self._codec.compress(coded))
                sizes[stored] = round(size * _PLANES_COST) if in_planes(stored) else size
        return min(sizes, key=sizes.__getitem__)

    def write(self, segments: Segments) -> None:
        """Append a row group.

        If there is a second core, a thread compresses, hashes and stores a large row group while
        the caller prepares the next one. The next call to `write` or `finish` raises the thread's
        error.
        """
        self.rows += len(segments.owner)
        stored = self._coding = self._coding or self._choose_coding(segments.sets_LNK)
        self._thread.submit(lambda: self._write(segments, stored), segments.sets_LNK.nbytes)

    def finish(self) -> TraceFile:
        """Create the object, and return its description for the commit."""
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

    def _write(self, segments: Segments, stored: Coding) -> None:
        n = len(segments.owner)
        known = [bits for bits in segments.validity if bits is not None]
        plain = (
            _texts(segments.owner),
            np.array(segments.token_start, "<i4").tobytes(),
            np.array(segments.tokens, "<i4").tobytes(),
            _levels(segments.validity) + _texts(known),
        )
        chunks = [self._put([content], n, _PLAIN) for content in plain]
        # Before and after the coded sets, the pages of all layers are the same.
        width = row_bytes(self.geometry.topk, self.geometry.experts)
        lengths = [width * tokens for tokens in segments.tokens]
        if in_planes(stored):  # one value for all segments, then empty values
            head, tail = sum(lengths).to_bytes(4, "little"), bytes(4 * (n - 1))
        else:
            head, tail = stored_lengths(lengths), b""
        for sets_NK in segments.sets_LNK:
            coded = _encoded(sets_NK, segments.tokens, self.geometry.experts, stored)
            chunks.append(self._put([head, coded, tail], n, _layer_encoding(stored)))
        self._groups.append((n, chunks))

    def _put(self, pieces: Sequence[_Bytes], values: int, encoding: int) -> _Chunk:
        """Write a column chunk that consists of one page, whose content is given in pieces."""
        whole = sum(map(len, pieces))
        if self._codec is not None:
            pieces = [self._codec.compress(b"".join(pieces), asbytes=True)]
        size = sum(map(len, pieces))
        page = {1: int32(values), 2: int32(encoding), 3: int32(_RLE), 4: int32(_RLE)}
        header = struct({1: int32(0), 2: int32(whole), 3: int32(size), 5: struct(page)}).content
        digest = hashlib.sha256()
        offset = self._upload.size
        for piece in (header, *pieces):
            digest.update(piece)
            self._upload.write(piece)
        range_ = Range(offset, len(header) + size, digest.hexdigest())
        return _Chunk(range_, len(header) + whole)

    def _footer(self) -> bytes:
        stored = self._coding or coding(self.geometry.experts, gaps=self._codec is not None)
        alike = [self._of_all_groups(field, stored) for field in self._schema]
        metadata = file_metadata("routes", self.geometry, self._provenance, stored)
        root = struct({4: text("schema"), 5: int32(len(self._schema))})
        pairs = [struct({1: text(key), 2: text(value)}) for key, value in metadata.items()]
        return struct(
            {
                1: int32(2),
                2: listed([root, *map(_described, self._schema)]),
                3: int64(self.rows),
                4: listed([_group(alike, *group) for group in self._groups]),
                5: listed(pairs),
                6: text(f"retrace version {pipeline.__version__}"),
            }
        ).content

    def _of_all_groups(self, field: pa.Field, stored: Coding) -> dict[int, Value]:
        """Return the footer fields whose values for a column are the same in every row group."""
        encoding = _PLAIN if field.name in SEGMENT.names else _layer_encoding(stored)
        return {
            1: int32(_TYPES[field.type]),
            2: listed([int32(encoding), int32(_RLE)]),
            3: listed([text(field.name)]),
            4: int32(self._number),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._opened.__exit__(kind, error, trace)


def _encoded(
    sets_NK: npt.NDArray[Any], tokens: Sequence[int], experts: int, stored: Coding
) -> memoryview:
    """Return the coded bytes of a layer's ascending sets. Gaps of segments overwrite the sets."""
    gaps = has_gaps(stored, experts)
    if in_planes(stored):
        coded = encode_planes(sets_NK, gaps=gaps)
    elif gaps:
        take_gaps(sets_NK)
        coded = pack(sets_NK[np.newaxis], tokens).reshape(-1)
    else:
        coded = ids_bytes(sets_NK).reshape(-1)
    return coded.data


def _layer_encoding(stored: Coding) -> int:
    return _PLAIN if in_planes(stored) else _DELTA_LENGTH


def _group(alike: Sequence[dict[int, Value]], rows: int, chunks: Sequence[_Chunk]) -> Value:
    columns = []
    for of_all, chunk in zip(alike, chunks, strict=True):
        own = {
            **of_all,
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
    """Return texts or bytes in Parquet's PLAIN encoding."""
    found = [value if isinstance(value, bytes) else value.encode() for value in values]
    return b"".join(part for data in found for part in (len(data).to_bytes(4, "little"), data))


def _levels(values: Sequence[object]) -> bytes:
    """Return the definition levels of an optional column, preceded by their length in bytes.

    A level is one bit: 1 for a value, 0 for null.
    """
    there = np.array([value is not None for value in values])
    if there.all() or not there.any():
        run = varint(len(values) << 1) + bytes([int(there[0])])
    else:
        bits = np.packbits(there, bitorder="little").tobytes()
        run = varint(len(bits) << 1 | 1) + bits
    return len(run).to_bytes(4, "little") + run
