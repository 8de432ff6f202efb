"""How expert sets become bytes: sorted, then gaps.

A row of K ascending ids is stored as its first id, then each id's difference to the one before,
minus 1. Up to 256 experts a gap is one byte. Above, the low bytes of all gaps of a segment come
first, then all high bytes: apart they compress to 1.03 x the entropy bound, as uint16 to 1.3 x.

Letters: T rows of a segment, K experts per row, E experts; N rows of several segments.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.traces.records import Geometry, Routes, TraceError

GAPS_8 = "gaps-uint8"
GAPS_16 = "gaps-uint16-planes"


def coding(experts: int) -> str:
    """The name of the coding, as it stands in a file's metadata."""
    return GAPS_8 if experts <= 256 else GAPS_16


def checked(sets: npt.NDArray[Any], experts: int) -> npt.NDArray[Any]:
    """Expert sets [..., K] as they are stored: ascending in a row, uint8 or uint16 by E.

    Any integer dtype is taken. Raises TraceError for ids outside 0..E-1 and for a row that names
    an expert twice.
    """
    if sets.ndim < 1 or sets.dtype.kind not in "iu":
        raise TraceError(
            f"expert ids: {sets.dtype} of shape {sets.shape}, expected integers [.., K]"
        )
    dtype = np.uint8 if experts <= 256 else np.uint16
    if sets.size == 0:
        return sets.astype(dtype)
    if sets.max() >= experts or sets.min() < 0:
        found = sets[(sets >= experts) | (sets < 0)].flat[0]
        raise TraceError(f"expert id {found}: expected 0..{experts - 1}")
    sets = sets.astype(dtype, copy=False)
    if not _ascending(sets):
        sets = np.sort(sets, axis=-1)
        if not _ascending(sets):
            double = np.argwhere(sets[..., 1:] == sets[..., :-1])[0][:-1]
            row = sets[tuple(double)].tolist()
            raise TraceError(f"row {double.tolist()} names an expert twice: {row}")
    return sets


def canonical(routes: Routes, geometry: Geometry, rows: int) -> Routes:
    """Routes as they are stored and digested: sets ascending, invalid rows holding 0..K-1.

    Raises TraceError when they have not `rows` rows of this geometry or an id is wrong.
    """
    expected = (rows, len(geometry.layers), geometry.topk)
    if routes.sets_TLK.shape != expected or routes.valid_T.shape != (rows,):
        raise TraceError(
            f"routes of shape {routes.sets_TLK.shape} with {routes.valid_T.shape} validity bits, "
            f"expected {expected} and {(rows,)}: one row per token but the last"
        )
    if routes.valid_T.dtype != np.bool_:
        raise TraceError(f"validity is {routes.valid_T.dtype}, expected bool")
    sets_TLK = routes.sets_TLK
    if not routes.valid_T.all():
        sets_TLK = sets_TLK.copy()
        sets_TLK[~routes.valid_T] = np.arange(geometry.topk)
    return Routes(checked(sets_TLK, geometry.experts), routes.valid_T)


def gaps(sets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Checked sets [..., K] to first ids and gaps, of the same shape and dtype."""
    coded = sets.copy()
    coded[..., 1:] -= sets[..., :-1]
    coded[..., 1:] -= 1
    return coded


def pack(gaps_TK: npt.NDArray[Any]) -> bytes:
    """The bytes of one segment's gaps in one layer."""
    if gaps_TK.dtype == np.uint8:
        return gaps_TK.tobytes()
    low = (gaps_TK & 0xFF).astype(np.uint8)
    high = (gaps_TK >> 8).astype(np.uint8)
    return low.tobytes() + high.tobytes()


def encode(sets_TK: npt.NDArray[Any], experts: int) -> bytes:
    """The bytes of one segment in one layer. Raises TraceError as `checked` does."""
    return pack(gaps(checked(sets_TK, experts)))


def decode(data: bytes, tokens: int, topk: int, experts: int) -> npt.NDArray[Any]:
    """The sets [T, K] of one segment in one layer. Raises TraceError as `decode_segments` does."""
    return decode_segments([data], [tokens], topk, experts)


def decode_segments(
    parts: Sequence[bytes | memoryview], tokens: Sequence[int], topk: int, experts: int
) -> npt.NDArray[Any]:
    """The sets [N, K] of several segments of one layer, one after the other; N = sum of tokens.

    Raises TraceError for a wrong length or an id outside 0..E-1. What is decoded is strictly
    ascending by construction.
    """
    width = topk * (1 if experts <= 256 else 2)
    for part, rows in zip(parts, tokens, strict=True):
        if len(part) != rows * width:
            raise TraceError(f"{len(part)} coded bytes, expected {rows} rows of {width}")
    coded = np.frombuffer(b"".join(parts), np.uint8)
    gaps_NK: npt.NDArray[Any] = coded if experts <= 256 else _joined_planes(coded, tokens, topk)
    gaps_NK = gaps_NK.reshape(-1, topk)
    sets_NK = np.empty_like(gaps_NK)
    # Wider than the ids, so that no sum can wrap: K gaps of 255 fit uint16, of 65535 uint32.
    id_N: npt.NDArray[np.uint16 | np.uint32] = gaps_NK[:, 0].astype(
        np.uint16 if experts <= 256 else np.uint32
    )
    sets_NK[:, 0] = id_N
    # Column by column is six times faster than np.cumsum over a short last axis.
    for k in range(1, topk):
        id_N += gaps_NK[:, k]
        id_N += 1
        sets_NK[:, k] = id_N
    if len(id_N) and id_N.max() >= experts:
        raise TraceError(f"expert id {id_N.max()}: expected 0..{experts - 1}")
    return sets_NK


def _ascending(sets: npt.NDArray[Any]) -> bool:
    return bool((sets[..., 1:] > sets[..., :-1]).all())


def _joined_planes(
    data: npt.NDArray[np.uint8], tokens: Sequence[int], topk: int
) -> npt.NDArray[np.uint16]:
    joined = np.empty(len(data) // 2, np.uint16)
    at = 0
    for rows in tokens:
        size = rows * topk
        low, high = data[2 * at : 2 * at + size], data[2 * at + size : 2 * (at + size)]
        joined[at : at + size] = low | (high.astype(np.uint16) << 8)
        at += size
    return joined
