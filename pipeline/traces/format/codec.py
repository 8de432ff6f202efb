"""The coding of expert sets as bytes: sorted ids, stored as gaps or as plain ids.

A row of K ascending ids is stored as its first id, followed by gaps: each id's difference from the
previous id, minus 1. With up to 256 experts, a gap takes one byte. With more, it takes two bytes,
and the low bytes of all gaps in a segment precede all the high bytes. Separated in this way, the
gaps compress to 1.03 times the entropy bound; stored as uint16, they would compress to 1.3 times
the bound. In files without compression, gaps save no space, so these files store plain ids.

Dimensions: T is the number of rows in a segment, N the number of rows in several segments, K the
number of experts per row and E the number of experts.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pipeline.model.geometry import Geometry
from pipeline.traces.format.types import Routes, TraceError
from pipeline.traces.sorted_rows import BLOCK, is_sorted, sort_rows

Coding = Literal[
    "gaps-uint8",
    "gaps-uint16-planes",
    "ids-uint8",
    "ids-uint16",
    "gaps-planes",
    "ids-planes",
]
"""Names of the codings, as they appear in a file's metadata. The last two are those of
`pipeline.traces.format.planes`; they code a row group at a time, the others a segment."""
PLANES: dict[bool, Coding] = {True: "gaps-planes", False: "ids-planes"}
"""The codings of row groups: whether a coding stores gaps, and its name."""


def coding(experts: int, *, gaps: bool = True) -> Coding:
    """Return the name of the coding of segments for ids 0..experts-1, as gaps or as plain ids."""
    if experts <= 256:
        return "gaps-uint8" if gaps else "ids-uint8"
    return "gaps-uint16-planes" if gaps else "ids-uint16"


def has_gaps(stored: str | None, experts: int) -> bool:
    """Return whether a coding stores gaps rather than plain ids.

    Raises TraceError for an unknown coding.
    """
    known = {coding(experts, gaps=gaps): gaps for gaps in (True, False)}
    known |= {name: gaps for gaps, name in PLANES.items()}
    for name, gaps in known.items():
        if stored == name:
            return gaps
    raise TraceError(f"unknown coding {stored!r}, expected one of {list(known)}")


def in_planes(stored: str | None) -> bool:
    """Return whether a coding codes the rows of a row group together, in planes."""
    return stored in PLANES.values()


def checked(sets: npt.NDArray[Any], experts: int) -> npt.NDArray[Any]:
    """Return expert sets [..., K] in stored form: in ascending order, as uint8 or uint16.

    The result is uint16 above 256 experts. Input of any integer dtype is accepted. Raises
    TraceError for an id outside 0..E-1, and for a row that contains an expert twice.
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
        _check_bounds(sets, experts)  # a cast to a smaller type would hide a large or negative id
        sets, ours = sets.astype(dtype, order="C"), True
    if not sets.flags.c_contiguous:
        sets, ours = _contiguous(sets), True
    if not _in_order(sets):
        sets = sets if ours else sets.copy()
        _put_in_order(sets, experts)
    _check_largest(sets, experts)
    return sets


def canonical(routes: Routes, geometry: Geometry, rows: int) -> Routes:
    """Return routes in stored and digested form: ascending sets, and 0..K-1 in invalid rows.

    Args:
        routes: A sample's routes.
        geometry: The geometry that the routes must have.
        rows: The number of rows that the routes must have.

    Returns:
        Routes whose sets_TLK is a view of an array [L, T, K], so that each layer's rows are
        contiguous in memory, as in a file.

    Raises:
        TraceError: The routes have the wrong shape, or an id is out of range or repeated in a row.
    """
    _check_form(routes, geometry, rows)
    sets_LTK = routes.sets_TLK.swapaxes(0, 1)
    if np.count_nonzero(routes.valid_T) != rows:  # all() takes 10 times as long for few rows
        sets_LTK = np.array(sets_LTK, order="C")
        sets_LTK[:, ~routes.valid_T] = np.arange(geometry.topk)
    sets_LTK = checked(sets_LTK, geometry.experts)
    return Routes(sets_LTK.swapaxes(0, 1), routes.valid_T.copy())


def canonical_samples(
    routes: Sequence[Routes], geometry: Geometry, rows: Sequence[int]
) -> list[Routes]:
    """Return the canonical routes of several short samples.

    This is much faster than calling `canonical` for each sample. For a short sample, the overhead
    of numpy calls exceeds the time needed to sort the rows, so all samples are sorted together in
    one array.

    Args:
        routes: The routes of each sample.
        geometry: The geometry that all routes must have.
        rows: The number of rows that each sample's routes must have.

    Raises:
        TraceError: The routes of a sample are invalid. To find the invalid sample, call `canonical`
            for each sample.
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
        Routes(sets_LNK[:, start:end].swapaxes(0, 1), of_sample.valid_T.copy())
        for of_sample, start, end in zip(routes, ends, ends[1:], strict=False)
    ]


def _check_form(routes: Routes, geometry: Geometry, rows: int) -> None:
    expected = (rows, len(geometry.layers), geometry.topk)
    if routes.sets_TLK.shape != expected or routes.valid_T.shape != (rows,):
        raise TraceError(
            f"routes of shape {routes.sets_TLK.shape} with {routes.valid_T.shape} validity bits, "
            f"expected {expected} and {(rows,)}: one row per token except the last"
        )
    if routes.valid_T.dtype != np.bool_:
        raise TraceError(f"validity is {routes.valid_T.dtype}, expected bool")


def _in_order(sets: npt.NDArray[Any]) -> bool:
    row = sets.reshape(-1, sets.shape[-1])[0].tolist()
    # If the sets are still in the router's order, the first row usually reveals this.
    return row == sorted(row) and is_sorted(sets)


def _put_in_order(sets: npt.NDArray[Any], experts: int) -> None:
    if not sort_rows(sets):
        _check_bounds(sets, experts)
        double = np.argwhere(sets[..., 1:] == sets[..., :-1])[0][:-1]
        row = sets[tuple(double)].tolist()
        raise TraceError(f"row {double.tolist()} contains an expert twice: {row}")


def _check_largest(sets: npt.NDArray[Any], experts: int) -> None:
    """Check the bounds of ascending sets; this is faster than `_check_bounds`."""
    if sets.max() >= experts:  # three times faster than the maximum of the last column
        _check_bounds(sets, experts)


def _check_bounds(sets: npt.NDArray[Any], experts: int) -> None:
    if sets.max() >= experts or sets.min() < 0:
        found = sets[(sets >= experts) | (sets < 0)].flat[0]
        raise TraceError(f"expert id {found}: expected 0..{experts - 1}")


def _contiguous(sets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a contiguous copy of the sets.

    Each row is copied as one item, which is 3 to 10 times faster than copying each id separately.
    """
    if sets.strides[-1] != sets.itemsize:
        return np.ascontiguousarray(sets)
    row = np.dtype((np.void, sets.shape[-1] * sets.itemsize))
    return np.ascontiguousarray(sets.view(row)).view(sets.dtype)


def gaps(sets: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return each of the ascending sets [..., K] as its first id followed by its gaps."""
    coded = np.array(sets, order="C")
    take_gaps(coded)
    return coded


def take_gaps(sets: npt.NDArray[Any]) -> None:
    """Replace each of the ascending sets [..., K] in place with its first id and its gaps.

    The sets must be contiguous in memory.
    """
    topk = sets.shape[-1]
    ids = sets.reshape(-1)
    for start in range(0, ids.size, topk * BLOCK):
        block = ids[start : start + topk * BLOCK]
        # Subtracting a block as one long row is many times faster than subtracting rows of length
        # K. It also overwrites the first id of each row, so the first ids are then restored.
        firsts = block[::topk].copy()
        found = np.subtract(block[1:], block[:-1])
        np.subtract(found, 1, out=block[1:])
        block[::topk] = firsts


def pack(gaps_LNK: npt.NDArray[Any], tokens: Sequence[int] | None = None) -> npt.NDArray[np.uint8]:
    """Return the bytes of each layer's gaps: [L, N * K], or [L, 2 * N * K] above 256 experts.

    The N rows belong to consecutive segments whose row counts are `tokens`; None means that they
    belong to one segment.
    """
    layers, rows, topk = gaps_LNK.shape
    if gaps_LNK.dtype == np.uint8:
        return gaps_LNK.reshape(layers, -1)
    bytes_LXP = gaps_LNK.astype("<u2", copy=False).view(np.uint8).reshape(layers, -1, 2)
    ends = topk * np.cumsum([0, *([rows] if tokens is None else tokens)])
    pieces = [bytes_LXP[:, i:j, p] for i, j in itertools.pairwise(ends.tolist()) for p in (0, 1)]
    return np.concatenate([bytes_LXP[:, :0, 0], *pieces], axis=1)


def stored_lengths(lengths: Sequence[int]) -> bytes:
    """Encode the lengths that precede the values in Parquet's DELTA_LENGTH_BYTE_ARRAY encoding.

    The lengths are stored as DELTA_BINARY_PACKED: the first length, followed by the differences
    between successive lengths, in blocks of 128 that consist of miniblocks of 32. Each block stores
    its smallest difference, and the amount by which each difference exceeds the smallest one
    (apache/parquet-format, Encodings.md).
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
    """Encode a non-negative number with seven bits per byte, lowest bits first."""
    if number < 0x80:
        return number.to_bytes(1, "little")
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def encode(sets_TK: npt.NDArray[Any], experts: int, stored: Coding | None = None) -> bytes:
    """Encode the sets of one segment in one layer.

    Args:
        sets_TK: Expert ids [T, K] of any integer dtype.
        experts: The number of experts in the layer.
        stored: The coding; None means gaps.

    Raises:
        TraceError: An id is out of range or repeated in a row.
    """
    _refuse_planes(stored)
    sets_TK = checked(sets_TK, experts)
    if stored is not None and not has_gaps(stored, experts):
        return ids_bytes(sets_TK).tobytes()
    return pack(gaps(sets_TK)[np.newaxis]).tobytes()


def decode(
    data: bytes, tokens: int, topk: int, experts: int, stored: Coding | None = None
) -> npt.NDArray[Any]:
    """Decode the sets of one segment in one layer.

    Args:
        data: The stored bytes.
        tokens: T, the number of rows.
        topk: K, the number of experts per row.
        experts: E, the number of experts in the layer.
        stored: The coding; None means gaps.

    Returns:
        The sets [T, K], uint8 or, above 256 experts, uint16.

    Raises:
        TraceError: The length of `data` is wrong, an id is outside 0..E-1, or the ids in a row do
            not ascend.
    """
    return decode_segments([data], [tokens], topk, experts, stored)


def decode_segments(
    parts: Sequence[bytes | memoryview],
    tokens: Sequence[int],
    topk: int,
    experts: int,
    stored: Coding | None = None,
) -> npt.NDArray[Any]:
    """Decode the sets of several segments in one layer.

    Args:
        parts: The stored bytes of each segment.
        tokens: The number of rows in each segment.
        topk: K, the number of experts per row.
        experts: E, the number of experts in the layer.
        stored: The coding; None means gaps.

    Returns:
        The sets [N, K] of all segments in order, where N is the sum of `tokens`: uint8 or, above
        256 experts, uint16.

    Raises:
        TraceError: The length of a part is wrong, an id is outside 0..E-1, or the ids in a row do
            not ascend.
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
    """Return the size of a coded row in bytes."""
    return topk * (1 if experts <= 256 else 2)


def decode_rows(
    sets_NK: npt.NDArray[Any],
    coded: npt.NDArray[np.uint8],
    tokens: Sequence[int],
    experts: int,
    stored: str | None,
) -> None:
    """Decode consecutive segments, with N rows in total, into a contiguous array.

    Args:
        sets_NK: The array [N, K] to fill: uint8 or, above 256 experts, uint16.
        coded: The stored bytes of exactly these segments.
        tokens: The number of rows in each segment.
        experts: E, the number of experts in the layer.
        stored: The name of the coding, from the file's metadata.

    Raises:
        TraceError: The coding is unknown, an id is outside 0..E-1, or the ids in a row do not
            ascend.
    """
    _refuse_planes(stored)
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
        # A sum that overflows is not greater than the previous id, so the order check detects it.
        if not is_sorted(block_NK) or block_NK.max() >= experts:
            found = (gaps_NK.astype(np.int64).sum(axis=1) + topk - 1).max()
            raise TraceError(f"expert id {found}: expected 0..{experts - 1}")


def _refuse_planes(stored: str | None) -> None:
    if in_planes(stored):
        raise TraceError(f"coding {stored!r} is for row groups, expected one for segments")


def _copy_ids(sets_NK: npt.NDArray[Any], coded: npt.NDArray[np.uint8], experts: int) -> None:
    ids_NK = coded.view(sets_NK.dtype.newbyteorder("<")).reshape(sets_NK.shape)
    for start in range(0, len(sets_NK), BLOCK):
        block_NK = sets_NK[start : start + BLOCK]
        block_NK[:] = ids_NK[start : start + BLOCK]
        if not is_sorted(block_NK):
            wrong = (block_NK[:, 1:] <= block_NK[:, :-1]).any(axis=1).argmax()
            raise TraceError(f"ids {block_NK[wrong].tolist()}: expected ascending ids")
        if block_NK.max() >= experts:
            raise TraceError(f"expert id {block_NK.max()}: expected 0..{experts - 1}")


def ids_bytes(sets: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return the little-endian bytes of ids [..., K]: [..., K], or [..., 2 K] above 256 experts."""
    return sets.astype(sets.dtype.newbyteorder("<"), copy=False).view(np.uint8)


def _sum_by_column(gaps_NK: npt.NDArray[Any], sets_NK: npt.NDArray[Any]) -> None:
    """Add up first ids and gaps, column by column.

    This is six times faster than np.cumsum along the short axis.
    """
    id_N = gaps_NK[:, 0].copy()
    sets_NK[:, 0] = id_N
    for k in range(1, gaps_NK.shape[1]):
        id_N += gaps_NK[:, k]
        id_N += 1
        sets_NK[:, k] = id_N


def _sum_as_words(gaps_NK: npt.NDArray[Any], sets_NK: npt.NDArray[Any]) -> None:
    """Add up first ids and gaps, with one multiplication per row.

    Each row must be as wide as a machine word. This is four times faster than `_sum_by_column`.
    Each id is in a lane of w bits. Lane k of the product of a row and 1 + 2^w + 2^2w + ... contains
    the sum of the row's lanes 0..k.
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
