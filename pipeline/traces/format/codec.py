"""The coding of expert sets as bytes: sorted ids, stored as gaps or as they are.

A row of K ascending ids is stored as its first id, then each id's difference to the one before,
minus 1. Up to 256 experts a gap is one byte. Above 256, the low bytes of all gaps of a segment come
first, then all high bytes: separated they compress to 1.03 x the entropy bound, as uint16 to 1.3 x.
What is not compressed gains nothing from gaps: then the ids themselves are stored.

Letters: T rows of a segment, K experts per row, E experts; N rows of several segments.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.traces.format.types import Routes, TraceError
from pipeline.traces.sorted_rows import BLOCK, is_sorted, sort_rows

Coding = Literal["gaps-uint8", "gaps-uint16-planes", "ids-uint8", "ids-uint16"]
"""A coding by its name in a file's metadata."""


def coding(experts: int, *, gaps: bool = True) -> Coding:
    """The coding of ids of this range."""
    if experts <= 256:
        return "gaps-uint8" if gaps else "ids-uint8"
    return "gaps-uint16-planes" if gaps else "ids-uint16"


def has_gaps(stored: str | None, experts: int) -> bool:
    """Whether sets are stored as gaps; False: as ids. Raises TraceError for another coding."""
    known = {coding(experts, gaps=gaps): gaps for gaps in (True, False)}
    for name, gaps in known.items():
        if stored == name:
            return gaps
    raise TraceError(f"coding {stored!r} is not known, expected one of {list(known)}")


def checked(sets: npt.NDArray[Any], experts: int) -> npt.NDArray[Any]:
    """Expert sets [..., K] as stored: ascending in each row; uint8 up to 256 experts, else uint16.

    Any integer dtype is accepted. Raises TraceError for ids outside 0..E-1 and for a row that names
    an expert twice.
    """
    if sets.ndim < 1 or sets.dtype.kind not in "iu":
        raise TraceError(
            f"expert ids: {sets.dtype} of shape {sets.shape}, expected integers [.., K]"
        )
    dtype = np.uint8 if experts <= 256 else np.uint16
    if sets.size == 0:
        return sets.astype(dtype)
    ours = False
    if sets.dtype != dtype:
        _check_bounds(sets, experts)  # a smaller type would hide a large or negative id
        sets, ours = sets.astype(dtype, order="C"), True
    if not sets.flags.c_contiguous:
        sets, ours = _contiguous(sets), True
    if not _in_order(sets):
        sets = sets if ours else sets.copy()
        _put_in_order(sets, experts)
    _check_largest(sets, experts)
    return sets


def canonical(routes: Routes, geometry: Geometry, rows: int) -> Routes:
    """Routes as stored and digested: sets ascending, invalid rows holding 0..K-1.

    In memory a layer's rows are contiguous, as in a file: sets_TLK is a view of an array [L, T, K].
    Raises TraceError when the routes do not have `rows` rows of this geometry or an id is wrong.
    """
    _check_form(routes, geometry, rows)
    sets_LTK = routes.sets_TLK.swapaxes(0, 1)
    if np.count_nonzero(routes.valid_T) != rows:  # all() takes 10 times as long for few
        sets_LTK = np.array(sets_LTK, order="C")
        sets_LTK[:, ~routes.valid_T] = np.arange(geometry.topk)
    sets_LTK = checked(sets_LTK, geometry.experts)
    return Routes(sets_LTK.swapaxes(0, 1), routes.valid_T)


def canonical_samples(
    routes: Sequence[Routes], geometry: Geometry, rows: Sequence[int]
) -> list[Routes]:
    """What `canonical` makes of each of several short samples, in a fraction of the time.

    A call of numpy takes longer than sorted_rows a short sample does. They share an array. Raises
    TraceError when one of them is wrong; `canonical` of each says which.
    """
    for of_sample, T in zip(routes, rows, strict=True):
        _check_form(of_sample, geometry, T)
    ends = list(itertools.accumulate(rows, initial=0))
    sets_LNK = np.empty((len(geometry.layers), ends[-1], geometry.topk), geometry.dtype)
    row = np.dtype((np.void, geometry.topk * sets_LNK.itemsize))
    rows_LN = sets_LNK.view(row)[..., 0]
    for of_sample, start, end in zip(routes, ends, ends[1:], strict=False):
        sets_TLK = of_sample.sets_TLK
        if sets_TLK.dtype != sets_LNK.dtype or sets_TLK.strides[-1] != sets_TLK.itemsize:
            sets_TLK = canonical(of_sample, geometry, end - start).sets_TLK
        rows_LN[:, start:end] = sets_TLK.view(row)[..., 0].T
    valid_N = np.concatenate([of_sample.valid_T for of_sample in routes])
    if not valid_N.all():
        sets_LNK[:, ~valid_N] = np.arange(geometry.topk)
    if sets_LNK.size:
        _put_in_order(sets_LNK, geometry.experts)
        _check_largest(sets_LNK, geometry.experts)
    return [
        Routes(sets_LNK[:, start:end].swapaxes(0, 1), of_sample.valid_T)
        for of_sample, start, end in zip(routes, ends, ends[1:], strict=False)
    ]


def _check_form(routes: Routes, geometry: Geometry, rows: int) -> None:
    expected = (rows, len(geometry.layers), geometry.topk)
    if routes.sets_TLK.shape != expected or routes.valid_T.shape != (rows,):
        raise TraceError(
            f"routes of shape {routes.sets_TLK.shape} with {routes.valid_T.shape} validity bits, "
            f"expected {expected} and {(rows,)}: one row per token but the last"
        )
    if routes.valid_T.dtype != np.bool_:
        raise TraceError(f"validity is {routes.valid_T.dtype}, expected bool")


def _in_order(sets: npt.NDArray[Any]) -> bool:
    row = sets.reshape(-1, sets.shape[-1])[0].tolist()
    return row == sorted(row) and is_sorted(sets)  # one row mostly tells the router's order


def _put_in_order(sets: npt.NDArray[Any], experts: int) -> None:
    if not sort_rows(sets):
        _check_bounds(sets, experts)
        double = np.argwhere(sets[..., 1:] == sets[..., :-1])[0][:-1]
        row = sets[tuple(double)].tolist()
        raise TraceError(f"row {double.tolist()} names an expert twice: {row}")


def _check_largest(sets: npt.NDArray[Any], experts: int) -> None:
    """`_check_bounds` of ascending sets."""
    if sets.max() >= experts:  # over all of them: three times faster than over the last alone
        _check_bounds(sets, experts)


def _check_bounds(sets: npt.NDArray[Any], experts: int) -> None:
    if sets.max() >= experts or sets.min() < 0:
        found = sets[(sets >= experts) | (sets < 0)].flat[0]
        raise TraceError(f"expert id {found}: expected 0..{experts - 1}")


def _contiguous(sets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A contiguous copy. Each row is copied as one item, 3 to 10 times faster than id by id."""
    if sets.strides[-1] != sets.itemsize:
        return np.ascontiguousarray(sets)
    row = np.dtype((np.void, sets.shape[-1] * sets.itemsize))
    return np.ascontiguousarray(sets.view(row)).view(sets.dtype)


def gaps(sets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """First ids and gaps of ascending sets [..., K]."""
    coded = np.array(sets, order="C")
    take_gaps(coded)
    return coded


def take_gaps(sets: npt.NDArray[Any]) -> None:
    """Replace ascending sets [..., K], contiguous in memory, by their first ids and gaps."""
    topk = sets.shape[-1]
    ids = sets.reshape(-1)
    for start in range(0, ids.size, topk * BLOCK):
        block = ids[start : start + topk * BLOCK]
        # One long row is many times faster than rows of K; each row's first id is then set anew.
        firsts = block[::topk].copy()
        found = np.subtract(block[1:], block[:-1])
        np.subtract(found, 1, out=block[1:])
        block[::topk] = firsts


def pack(gaps_LNK: npt.NDArray[Any], tokens: Sequence[int] | None = None) -> npt.NDArray[np.uint8]:
    """The bytes of gaps, by layer: [L, N * K], above 256 experts [L, 2 * N * K].

    Their rows are those of one segment, or of several with so many `tokens`, one after the other.
    """
    layers, rows, topk = gaps_LNK.shape
    if gaps_LNK.dtype == np.uint8:
        return gaps_LNK.reshape(layers, -1)
    bytes_LXP = gaps_LNK.astype("<u2", copy=False).view(np.uint8).reshape(layers, -1, 2)
    ends = topk * np.cumsum([0, *([rows] if tokens is None else tokens)])
    pieces = [bytes_LXP[:, i:j, p] for i, j in itertools.pairwise(ends.tolist()) for p in (0, 1)]
    return np.concatenate([bytes_LXP[:, :0, 0], *pieces], axis=1)


def stored_lengths(lengths: Sequence[int]) -> bytes:
    """What stands before values of these lengths in Parquet's encoding DELTA_LENGTH_BYTE_ARRAY.

    It is their DELTA_BINARY_PACKED form: the first, then differences, 128 in a block and 32 in a
    miniblock, each less the least of its block (apache/parquet-format, Encodings.md).
    """
    differences = np.diff(np.array(lengths, np.int64))
    first = lengths[0] if lengths else 0
    found = [varint(128), varint(4), varint(len(lengths)), varint(first << 1)]
    for start in range(0, len(differences), 128):
        block = differences[start : start + 128]
        least = int(block.min())
        found.append(varint(least << 1 if least >= 0 else ~(least << 1)))
        padded = np.zeros(128, "<u4")
        padded[: len(block)] = block - least
        minis = padded.reshape(4, 32)
        widths = [int(mini.max()).bit_length() for mini in minis]
        found.append(bytes(widths))
        for mini, width in zip(minis, widths, strict=True):
            bits = np.unpackbits(mini.view(np.uint8).reshape(32, 4), axis=1, bitorder="little")
            found.append(np.packbits(bits[:, :width], bitorder="little").tobytes())
    return b"".join(found)


def varint(number: int) -> bytes:
    """A number that is not negative, seven bits a byte, the lowest first."""
    if number < 0x80:
        return number.to_bytes(1, "little")
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def encode(sets_TK: npt.NDArray[Any], experts: int, stored: Coding | None = None) -> bytes:
    """The bytes of one segment in one layer, by default gaps. Raises TraceError as `checked`."""
    sets_TK = checked(sets_TK, experts)
    if stored is not None and not has_gaps(stored, experts):
        return ids_bytes(sets_TK).tobytes()
    return pack(gaps(sets_TK)[np.newaxis]).tobytes()


def decode(
    data: bytes, tokens: int, topk: int, experts: int, stored: Coding | None = None
) -> npt.NDArray[Any]:
    """The sets [T, K] of one segment in one layer. Raises TraceError as `decode_segments` does."""
    return decode_segments([data], [tokens], topk, experts, stored)


def decode_segments(
    parts: Sequence[bytes | memoryview],
    tokens: Sequence[int],
    topk: int,
    experts: int,
    stored: Coding | None = None,
) -> npt.NDArray[Any]:
    """The sets [N, K] of several segments of one layer, one after the other; N = sum of tokens.

    Raises TraceError for a wrong length, an id outside 0..E-1 or ids that do not ascend.
    """
    width = row_bytes(topk, experts)
    for part, rows in zip(parts, tokens, strict=True):
        if len(part) != rows * width:
            raise TraceError(f"{len(part)} coded bytes, expected {rows} rows of {width}")
    coded = np.frombuffer(b"".join(parts), np.uint8)
    sets_NK = np.empty((len(coded) // width, topk), np.uint8 if experts <= 256 else np.uint16)
    decode_rows(sets_NK, coded, tokens, experts, coding(experts) if stored is None else stored)
    return sets_NK


def row_bytes(topk: int, experts: int) -> int:
    """Coded bytes of a row."""
    return topk * (1 if experts <= 256 else 2)


def decode_rows(
    sets_NK: npt.NDArray[Any],
    coded: npt.NDArray[np.uint8],
    tokens: Sequence[int],
    experts: int,
    stored: str | None,
) -> None:
    """Decode segments that lie one after the other, N rows in all, into a contiguous array.

    `coded` has exactly their bytes, `stored` names the coding. Raises TraceError for a coding that
    is not known, an id outside 0..E-1, or ids that do not ascend.
    """
    topk = sets_NK.shape[1]
    if not has_gaps(stored, experts):
        _copy_ids(sets_NK, coded, experts)
        return
    gaps_NK: npt.NDArray[Any] = coded if experts <= 256 else _joined_planes(coded, tokens, topk)
    gaps_NK = gaps_NK.reshape(-1, topk)
    whole = topk * gaps_NK.itemsize in (1, 2, 4, 8)
    sum_rows = _sum_as_words if whole else _sum_by_column
    for start in range(0, len(gaps_NK), BLOCK):
        block_NK = sets_NK[start : start + BLOCK]
        sum_rows(gaps_NK[start : start + BLOCK], block_NK)
        # A sum that overflowed is not greater than the id before it.
        if not is_sorted(block_NK) or block_NK.max() >= experts:
            found = (gaps_NK.astype(np.int64).sum(axis=1) + topk - 1).max()
            raise TraceError(f"expert id {found}: expected 0..{experts - 1}")


def _copy_ids(sets_NK: npt.NDArray[Any], coded: npt.NDArray[np.uint8], experts: int) -> None:
    ids_NK = coded.view(sets_NK.dtype.newbyteorder("<")).reshape(sets_NK.shape)
    for start in range(0, len(sets_NK), BLOCK):
        block_NK = sets_NK[start : start + BLOCK]
        block_NK[:] = ids_NK[start : start + BLOCK]
        if not is_sorted(block_NK):
            wrong = (block_NK[:, 1:] <= block_NK[:, :-1]).any(axis=1).argmax()
            raise TraceError(f"ids {block_NK[wrong].tolist()}: expected ascending ones")
        if block_NK.max() >= experts:
            raise TraceError(f"expert id {block_NK.max()}: expected 0..{experts - 1}")


def ids_bytes(sets: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of ids [..., K], little-endian: [..., K], above 256 experts [..., 2 K]."""
    return sets.astype(sets.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def _sum_by_column(gaps_NK: npt.NDArray[Any], sets_NK: npt.NDArray[Any]) -> None:
    """Sum first ids and gaps; six times faster than np.cumsum over a short last axis."""
    id_N = gaps_NK[:, 0].copy()
    sets_NK[:, 0] = id_N
    for k in range(1, gaps_NK.shape[1]):
        id_N += gaps_NK[:, k]
        id_N += 1
        sets_NK[:, k] = id_N


def _sum_as_words(gaps_NK: npt.NDArray[Any], sets_NK: npt.NDArray[Any]) -> None:
    """The same for rows that fill a machine word: one product sums a row, four times faster.

    Lane k of the product with 1 + 2^w + 2^2w + ... holds the sum of lanes 0..k.
    """
    topk, bits = gaps_NK.shape[1], 8 * gaps_NK.itemsize
    word = np.dtype(f"<u{topk * gaps_NK.itemsize}")
    sums_N = sets_NK.view(word)[:, 0]
    lanes = word.type(sum(1 << bits * k for k in range(topk)))
    np.multiply(gaps_NK.view(word)[:, 0], lanes, out=sums_N)
    sums_N += word.type(sum(k << bits * k for k in range(topk)))


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
