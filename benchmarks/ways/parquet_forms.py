"""Plain Parquet files of ids, as small as Parquet's encodings allow.

Every form has a column per layer, row groups of 32,768 tokens, one page per column chunk, and zstd
compression. The ids of a row are sorted, or sorted and replaced by gaps (see docs/trace-format.md).
No form contains the other data of a trace (owners of rows, digests, validity), and the reader
receives the sizes of the samples separately. Each file is therefore smaller than a usable file
would be.

Dimensions: N is the number of rows in all samples, L the number of MoE layers, and K the number of
experts per token.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.routes.recordings import Recording

ROW_GROUP_TOKENS = 32_768
Ids = npt.NDArray[Any]
"""[N, K] of one layer: uint8 for up to 256 experts, else uint16."""


@dataclass(frozen=True)
class Form:
    """A layout and encoding of a layer's ids."""

    name: str
    encoding: str
    column: Callable[[Ids, Recording], pa.Array]
    """Function that turns a layer's ids into a column."""
    rows: Callable[[Recording], float]
    """Function that returns the column's rows per token."""
    ids: Callable[[pa.Array, Recording], Ids]
    """Function that turns a column back into a layer's ids."""

    def encode(self, recording: Recording, gaps: bool, level: int) -> bytes:
        """Encode the routes of a recording as a file.

        Args:
            recording: Routes to encode.
            gaps: Whether to replace sorted ids by their gaps.
            level: The zstd level.
        """
        ids_LNK = sorted_ids(recording)
        if gaps:
            ids_LNK[..., 1:] -= ids_LNK[..., :-1] + 1
        columns = {f"layer_{i}": self.column(ids, recording) for i, ids in enumerate(ids_LNK)}
        dictionary = self.encoding == "DICTIONARY"
        sink = io.BytesIO()
        pq.write_table(
            pa.table(columns),
            sink,
            compression="zstd",
            compression_level=level,
            use_dictionary=dictionary,
            column_encoding=None if dictionary else dict.fromkeys(columns, self.encoding),
            row_group_size=max(1, round(ROW_GROUP_TOKENS * self.rows(recording))),
            data_page_size=64 << 20,
            write_statistics=False,
            store_schema=False,
        )
        return sink.getvalue()

    def decode(self, data: bytes, recording: Recording, gaps: bool) -> list[Ids]:
        """Decode a file.

        Args:
            data: The file.
            recording: The original, which gives the sizes of the samples.
            gaps: Whether the file contains gaps.

        Returns:
            The sets [T, L, K] of every sample.
        """
        table = pq.read_table(pa.BufferReader(data), use_threads=False).combine_chunks()
        columns = [column.combine_chunks() for column in table.columns]
        ids_LNK = np.stack([self.ids(column, recording) for column in columns])
        if gaps:
            ids_LNK[..., 1:] += 1
            np.cumsum(ids_LNK, axis=-1, dtype=ids_LNK.dtype, out=ids_LNK)
        ends = np.cumsum([len(routes_TLK) for routes_TLK in recording.routes])
        return [ids.swapaxes(0, 1) for ids in np.split(ids_LNK, ends[:-1], axis=1)]


def sorted_ids(recording: Recording) -> Ids:
    """Return the ids [L, N, K], ascending in each row."""
    ids_NLK = np.concatenate(recording.routes)
    return np.ascontiguousarray(np.sort(ids_NLK, axis=-1).swapaxes(0, 1))


def _dtype(recording: Recording) -> np.dtype[Any]:
    return recording.routes[0].dtype


def _buffer(ids: Ids) -> pa.Buffer:
    return pa.py_buffer(np.ascontiguousarray(ids))


def _by_sample(ids: Ids, recording: Recording) -> pa.Array:
    rows = [len(routes_TLK) for routes_TLK in recording.routes]
    ends = np.cumsum([0, *rows], dtype=np.int32) * np.int32(ids.itemsize * ids.shape[1])
    return pa.Array.from_buffers(pa.binary(), len(rows), [None, pa.py_buffer(ends), _buffer(ids)])


def _of_samples(column: pa.Array, recording: Recording) -> Ids:
    return np.frombuffer(column.buffers()[2], _dtype(recording)).reshape(-1, recording.topk)


def _by_token(ids: Ids, _: Recording) -> pa.Array:
    width = ids.itemsize * ids.shape[1]
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(ids), [None, _buffer(ids)])


def _of_tokens(column: pa.Array, recording: Recording) -> Ids:
    return np.frombuffer(column.buffers()[1], _dtype(recording)).reshape(-1, recording.topk)


def _by_id(ids: Ids, _: Recording) -> pa.Array:
    return pa.array(ids.ravel())


def _of_ids(column: pa.Array, recording: Recording) -> Ids:
    flat = column.to_numpy(zero_copy_only=False).astype(_dtype(recording))
    return flat.reshape(-1, recording.topk)


def _bits(recording: Recording) -> int:
    return (recording.experts - 1).bit_length()


def _packed(ids: Ids, recording: Recording) -> pa.Array:
    """Pack each sample's ids, using as many bits per id as the largest possible id needs."""
    bits = _bits(recording)
    pieces, at = [], 0
    for routes_TLK in recording.routes:
        flat = ids[at : at + len(routes_TLK)].ravel()
        at += len(routes_TLK)
        each = (flat[:, None] >> np.arange(bits, dtype=flat.dtype)).astype(np.uint8) & 1
        pieces.append(np.packbits(each, bitorder="little").tobytes())
    return pa.array(pieces, pa.binary())


def _unpacked(column: pa.Array, recording: Recording) -> Ids:
    bits, K, dtype = _bits(recording), recording.topk, _dtype(recording)
    found = []
    for piece, routes_TLK in zip(column, recording.routes, strict=True):
        count = len(routes_TLK) * K
        raw = np.frombuffer(piece.as_buffer(), np.uint8)
        each = np.unpackbits(raw, count=count * bits, bitorder="little").reshape(count, bits)
        powers = (1 << np.arange(bits)).astype(dtype)
        found.append((each.astype(dtype) * powers).sum(axis=1, dtype=dtype))
    return np.concatenate(found).reshape(-1, K)


def _a_sample(recording: Recording) -> float:
    return len(recording.routes) / recording.tokens


def _a_token(_: Recording) -> float:
    return 1


def _an_id(recording: Recording) -> float:
    return recording.topk


FORMS = (
    Form("binary by sample", "PLAIN", _by_sample, _a_sample, _of_samples),
    Form(
        "binary by sample, DELTA_LENGTH_BYTE_ARRAY",
        "DELTA_LENGTH_BYTE_ARRAY",
        _by_sample,
        _a_sample,
        _of_samples,
    ),
    Form("bits of ids, binary by sample", "PLAIN", _packed, _a_sample, _unpacked),
    Form("by token, BYTE_STREAM_SPLIT", "BYTE_STREAM_SPLIT", _by_token, _a_token, _of_tokens),
    Form("by token, DELTA_BYTE_ARRAY", "DELTA_BYTE_ARRAY", _by_token, _a_token, _of_tokens),
    Form("by id, DELTA_BINARY_PACKED", "DELTA_BINARY_PACKED", _by_id, _an_id, _of_ids),
    Form("by id, dictionary (bit-packed)", "DICTIONARY", _by_id, _an_id, _of_ids),
)
"""Forms for all of Parquet's encodings that can store ids: PLAIN, the three delta encodings, byte
stream split, and bit packing, both by our own code and in dictionary indices."""
