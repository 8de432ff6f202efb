"""Formats in which other frameworks send routes from the rollout engine to the trainer.

Each format follows its source. benchmarks/performance.md lists the sources and the costs that are
left out. A peer represents the format of one framework. It encodes samples as pieces (bodies of
HTTP responses, or files) and decodes the pieces into arrays [T, L, K].
"""

import io
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pybase64
import torch

from benchmarks.routes.recordings import Recording

Arrays = Sequence[npt.NDArray[Any]]


@dataclass(frozen=True)
class Peer:
    """The format and medium of one framework."""

    name: str
    medium: Literal["http", "ray", "file"]
    """Medium; `ray` is shared memory on one machine, and a connection between two machines."""
    pieces: int | None
    """Maximum number of pieces of a recording; None means one per sample."""
    encode: Callable[[Recording, int], bytes]
    """Function that takes a recording and the number of a piece, and returns the piece's bytes."""
    decode: Callable[[bytes, tuple[int, int]], list[npt.NDArray[Any]]]
    """Function that takes a piece and (L, K), and returns arrays."""

    def pieces_of(self, recording: Recording) -> int:
        """Return the number of pieces of a recording."""
        samples = len(recording.routes)
        if self.pieces is None:
            return samples
        return -(-samples // -(-samples // self.pieces))


def _encode_npy_base64(recording: Recording, number: int) -> bytes:
    """Encode like vLLM: .npy of uint8 or uint16, base64, in a field of a chat completion choice."""
    buffer = io.BytesIO()
    np.save(buffer, recording.routes[number], allow_pickle=False)
    text = pybase64.b64encode(buffer.getbuffer()).decode("ascii")
    return orjson.dumps({"choices": [{"index": 0, "routed_experts": text}]})


def _decode_npy_base64(piece: bytes, _: tuple[int, int]) -> list[npt.NDArray[Any]]:
    text = orjson.loads(piece)["choices"][0]["routed_experts"]
    return [np.load(io.BytesIO(pybase64.b64decode(text)), allow_pickle=False)]


def _encode_int32_base64(recording: Recording, number: int) -> bytes:
    """Encode like SGLang: the bytes of an int32 tensor, base64, in meta_info."""
    routes_TLK = recording.routes[number].astype(np.int32)
    text = pybase64.b64encode(routes_TLK.tobytes()).decode("utf-8")
    return orjson.dumps({"meta_info": {"routed_experts": text}})


def _decode_int32_base64(piece: bytes, shape_LK: tuple[int, int]) -> list[npt.NDArray[Any]]:
    """Decode like slime: a torch tensor over the decoded bytes."""
    text = orjson.loads(piece)["meta_info"]["routed_experts"]
    data = bytearray(pybase64.b64decode(text.encode("ascii")))
    return [torch.frombuffer(data, dtype=torch.int32).reshape(-1, *shape_LK).numpy()]


WORKERS = 8
"""Value of verl's agent.num_workers; each worker returns its share as one padded tensor."""


def _encode_int16_pickle(recording: Recording, number: int) -> bytes:
    """Encode like verl: a worker's padded int16 tensor, saved by torch.save, pickled as in Ray."""
    longest = max(map(len, recording.routes))
    each = -(-len(recording.routes) // WORKERS)
    routes = recording.routes[number * each : (number + 1) * each]
    shape = (len(routes), longest, recording.layers, recording.topk)
    padded_BNLK = torch.zeros(shape, dtype=torch.int16)
    mask_BN = torch.zeros(shape[:2], dtype=torch.bool)
    for i, routes_TLK in enumerate(routes):
        padded_BNLK[i, : len(routes_TLK)] = torch.from_numpy(routes_TLK.astype(np.int16))
        mask_BN[i, : len(routes_TLK)] = True
    buffer = io.BytesIO()
    torch.save({"routed_experts": padded_BNLK, "attention_mask": mask_BN}, buffer)
    return pickle.dumps((buffer.getvalue(), {}, {}), protocol=5)


def _encode_raw(recording: Recording, number: int) -> bytes:
    """Return only the array's bytes."""
    return recording.routes[number].tobytes()


def _decode_raw(piece: bytes, shape_LK: tuple[int, int]) -> list[npt.NDArray[Any]]:
    return [np.frombuffer(piece, np.uint8).reshape(-1, *shape_LK)]


def _decode_int16_pickle(piece: bytes, _: tuple[int, int]) -> list[npt.NDArray[Any]]:
    data, _non_tensors, _meta = pickle.loads(piece)
    batch = torch.load(io.BytesIO(data), weights_only=True)
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    padded_BNLK = batch["routed_experts"].numpy()
    return [rows[:length] for rows, length in zip(padded_BNLK, lengths, strict=True)]


def _encode_json(recording: Recording, number: int) -> bytes:
    """Encode as nested JSON lists, which clients received before base64 was introduced."""
    return orjson.dumps({"routed_experts": recording.routes[number].tolist()})


def _decode_json(piece: bytes, _: tuple[int, int]) -> list[npt.NDArray[Any]]:
    # int16 is NeMo-RL's default.
    return [np.array(orjson.loads(piece)["routed_experts"], np.int16)]


def _encode_parquet(recording: Recording, _: int) -> bytes:
    """Encode as a column of lists of ids, one row per sample, with pyarrow's defaults."""
    kind = pa.uint8() if recording.experts <= 256 else pa.uint16()
    flat = np.concatenate([routes_TLK.ravel() for routes_TLK in recording.routes])
    ends = np.cumsum([0, *(routes_TLK.size for routes_TLK in recording.routes)], dtype=np.int64)
    column = pa.LargeListArray.from_arrays(ends, pa.array(flat, kind))
    sink = io.BytesIO()
    rows = max(1, 32_768 * len(recording.routes) // recording.tokens)
    pq.write_table(pa.table({"routes": column}), sink, compression="zstd", row_group_size=rows)
    return sink.getvalue()


def _decode_parquet(piece: bytes, shape_LK: tuple[int, int]) -> list[npt.NDArray[Any]]:
    table = pq.read_table(pa.BufferReader(piece), use_threads=False)
    arrays: list[npt.NDArray[Any]] = []
    for chunk in table["routes"].chunks:
        flat, ends = chunk.values.to_numpy(), chunk.offsets.to_numpy()
        arrays += [flat[i:j].reshape(-1, *shape_LK) for i, j in itertools.pairwise(ends)]
    return arrays


PEERS = (
    Peer("vLLM HTTP: uint8 .npy, base64", "http", None, _encode_npy_base64, _decode_npy_base64),
    Peer("SGLang/slime: int32, base64", "http", None, _encode_int32_base64, _decode_int32_base64),
    Peer(
        "verl: int16 tensor, pickled",
        "ray",
        WORKERS,
        _encode_int16_pickle,
        _decode_int16_pickle,
    ),
    Peer("JSON lists", "http", None, _encode_json, _decode_json),
    Peer("Parquet list<uint8>, zstd", "file", 1, _encode_parquet, _decode_parquet),
)
"""Peers in the order of the table. Ratios are relative to the first one: of the formats that
current servers use, it needs the fewest bytes for up to 256 experts."""

RAW = Peer("raw uint8 arrays (lower bound)", "ray", None, _encode_raw, _decode_raw)
"""The bytes of the arrays, to show the cost of copying; no framework sends this form."""


def peer_of(name: str) -> Peer:
    """Return the peer with this name."""
    return next(peer for peer in (*PEERS, RAW) if peer.name == name)
