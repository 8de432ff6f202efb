"""The exact difference between a tensor and its former version, coded in a few bytes.

The coding treats a tensor's bytes as little-endian words of `width` bytes, regardless of its dtype.
A word is a pattern of bits, so NaNs and signed zeros are restored exactly. The words are divided
into blocks. A block lists the words that changed, each with two numbers: the number of unchanged
words before it (its gap), and the change of its pattern as an integer (its step). The lowest bytes
of all gaps form one plane, the second-lowest bytes another, and so on; the same holds for steps.
Under Adam at RL learning rates, most bf16 words stay the same, and most of the others change by
one. docs/trace-format.md specifies every byte.

Dimensions: W is the number of words in a tensor or block, P the number of words in a part of a
block, C the number of changed words, and B the number of bytes in a word.
"""

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

Words = npt.NDArray[Any]
"""An array of unsigned, little-endian words."""

BLOCK = 1 << 20
"""Number of words in a block. Smaller blocks take more bytes and calls, and larger blocks take more
memory. Blocks of other sizes are not faster."""
_PART = 1 << 17
"""Number of words to compare at a time, small enough for a core's cache."""
WIDTHS = (1, 2, 4, 8)
"""The widths that a word may have, in bytes."""

_HEAD = struct.Struct("<BQ")
"""The width of a word in bytes, and the number of words."""
_CHANGES = struct.Struct("<I")
"""The number of changed words in a block; if 0, the block ends here."""
_PLANES = struct.Struct("<BB")
"""The number of planes of gaps, and the number of planes of steps."""
_STORED = struct.Struct("<I")
"""The number of stored bytes of a plane. An uncompressed plane has one byte per changed word."""
_GAP_PLANES = 3
"""The maximum number of planes of gaps: a gap is less than `BLOCK`."""
_ZSTD = pa.Codec("zstd", compression_level=1)


class CodingError(ValueError):
    """The error for coded bytes that are damaged or belong to a different tensor."""


class Head(NamedTuple):
    """The size of the tensor to which a difference belongs. Example: Head(width=2, words=4096)."""

    width: int
    words: int

    @property
    def size(self) -> int:
        """The tensor's size in bytes."""
        return self.width * self.words


class _Block(NamedTuple):
    """A block with changes, and the positions of its planes in the coded bytes."""

    first: int
    """The index, in the tensor, of the block's first word."""
    words: int
    changes: int
    gaps: list[slice]
    """The positions of the stored bytes of each plane, lowest bytes first."""
    steps: list[slice]


def encode(old: "ReadableBuffer", new: "ReadableBuffer", width: int) -> bytes | None:
    """Code the difference between a tensor's new bytes and its former bytes.

    Args:
        old: The tensor's former bytes.
        new: The tensor's new bytes, of the same size as `old`.
        width: Bytes per word, one of `WIDTHS`. The size of the tensor's elements gives the
            smallest result; any other width is correct but may need more bytes.

    Returns:
        The coded bytes, or None if `old` and `new` are equal.

    Raises:
        ValueError: The sizes differ or are not a multiple of `width`.
    """
    old_W, new_W = _words(old, width), _words(new, width)
    if old_W.size != new_W.size:
        raise ValueError(
            f"found {new_W.nbytes} bytes, expected {old_W.nbytes} as in the former version; "
            "write a tensor whole if its size changed"
        )
    parts = [_HEAD.pack(width, old_W.size)]
    changed = False
    for first in range(0, old_W.size, BLOCK):
        block = _encode_block(old_W[first : first + BLOCK], new_W[first : first + BLOCK])
        changed |= len(block) > 1
        parts += block
    return b"".join(parts) if changed else None


def head_of(coded: "ReadableBuffer") -> Head:
    """Return the size of the tensor to which coded bytes belong. Raises CodingError."""
    view = memoryview(coded)
    if len(view) < _HEAD.size:
        raise CodingError(
            f"found a coded tensor of {len(view)} bytes, expected at least the {_HEAD.size} bytes "
            "of its head"
        )
    head = Head(*_HEAD.unpack_from(view))
    if head.width not in WIDTHS:
        raise CodingError(f"found words of {head.width} bytes, expected one of {WIDTHS}")
    return head


def count_changes(coded: bytes) -> int:
    """Return the number of words that changed, given the result of `encode`."""
    head = head_of(coded)
    view, dtype = memoryview(coded), np.dtype(f"<u{head.width}")
    count = 0
    for block in _blocks(view, head):
        if block.gaps:
            count += block.changes
        else:  # the steps of all words, some of which may be 0
            count += int(np.count_nonzero(_values(view, block.steps, block.changes, dtype)))
    return count


def apply(coded: "ReadableBuffer", target: "WriteableBuffer") -> None:
    """Change a tensor's former bytes into its new bytes, in place.

    All lengths are checked before the first byte changes. The function needs at most about 30 MB of
    memory, regardless of the content of the coded bytes. After a CodingError, the target may hold
    neither version and must be discarded. Raises CodingError for coded bytes that do not fit the
    target exactly, and ValueError for a read-only target.
    """
    view = memoryview(coded)
    head = head_of(view)
    size = memoryview(target).nbytes
    if head.size != size:
        raise CodingError(
            f"found a difference for a tensor of {head.words} words of {head.width} bytes, "
            f"expected one for a tensor of {size} bytes"
        )
    target_W = _words(target, head.width)
    if not target_W.flags.writeable:
        raise ValueError("the tensor to patch is read-only; map its file for writing")
    for block in list(_blocks(view, head)):
        _apply_block(view, block, target_W[block.first : block.first + block.words])


def _words(data: "ReadableBuffer", width: int) -> Words:
    """Return bytes as words, without a copy."""
    if width not in WIDTHS:
        raise ValueError(f"found words of {width} bytes, expected one of {WIDTHS}")
    size = memoryview(data).nbytes
    if size % width:
        raise ValueError(f"found {size} bytes, expected a multiple of {width}, the size of a word")
    dtype = np.dtype(f"<u{width}")
    return np.frombuffer(memoryview(data), dtype) if size else np.empty(0, dtype)


def _encode_block(old_W: Words, new_W: Words) -> list[bytes]:
    positions_C, steps_C = _changes(old_W, new_W)
    if not positions_C.size:
        return [_CHANGES.pack(0)]
    if 2 * positions_C.size > old_W.size:
        # If most words changed, steps of 0 for the others take less space than gaps.
        gaps, steps_C = [], new_W - old_W
    else:
        positions_C[1:] -= positions_C[:-1] + np.uint32(1)
        gaps = _planes(positions_C)
    steps = _planes(_zigzag(steps_C))
    sizes = (_STORED.pack(len(plane)) for plane in (*gaps, *steps))
    counts = _CHANGES.pack(steps_C.size), _PLANES.pack(len(gaps), len(steps))
    return [*counts, *sizes, *gaps, *steps]


def _changes(old_W: Words, new_W: Words) -> tuple[npt.NDArray[np.uint32], Words]:
    """Return the positions of the changed words, and their steps modulo 2^(bits of a word)."""
    part = min(_PART, old_W.size)
    steps_P, changed_P = np.empty(part, old_W.dtype), np.empty(part, np.bool_)
    positions, steps = [], []
    for first in range(0, old_W.size, _PART):
        old_P, new_P = old_W[first : first + part], new_W[first : first + part]
        # Reuse the same memory, because fresh pages would cost more time than the subtraction.
        differ_P = np.subtract(new_P, old_P, out=steps_P[: old_P.size])
        found = np.flatnonzero(np.not_equal(differ_P, 0, out=changed_P[: old_P.size]))
        positions.append((found + first).astype(np.uint32))
        steps.append(differ_P[found])
    return np.concatenate(positions), np.concatenate(steps)


def _zigzag(steps_C: Words) -> Words:
    """Fold steps: 0, -1, 1, -2, ... become 0, 1, 2, 3, ..., so a small step needs only one byte."""
    bits = 8 * steps_C.itemsize
    return (steps_C << 1) ^ -(steps_C >> (bits - 1))


def _unzigzag(coded_C: Words) -> Words:
    return (coded_C >> 1) ^ -(coded_C & 1)


def _planes(values_C: Words) -> list[bytes]:
    """Return the stored planes of values, lowest bytes first, up to the highest nonzero plane."""
    count = (int(values_C.max()).bit_length() + 7) // 8
    bytes_CB = values_C.view(np.uint8).reshape(values_C.size, values_C.itemsize)
    return [_stored(np.ascontiguousarray(bytes_CB[:, plane])) for plane in range(count)]


def _stored(plane_C: npt.NDArray[np.uint8]) -> bytes:
    compressed: bytes = _ZSTD.compress(plane_C, asbytes=True)
    return compressed if len(compressed) < plane_C.size else plane_C.tobytes()


def _blocks(view: memoryview, head: Head) -> Iterator[_Block]:
    """Yield the blocks that contain changes. Raises CodingError if a length does not fit."""
    at = _HEAD.size

    def take(fields: struct.Struct) -> tuple[int, ...]:
        nonlocal at
        if at + fields.size > len(view):
            raise CodingError(
                f"found a coded tensor of {len(view)} bytes, expected at least {at + fields.size}"
            )
        at += fields.size
        return fields.unpack_from(view, at - fields.size)

    for first in range(0, head.words, BLOCK):
        words = min(BLOCK, head.words - first)
        (changes,) = take(_CHANGES)
        if not changes:
            continue
        gaps, steps = take(_PLANES)
        if changes > words or gaps > _GAP_PLANES or not 1 <= steps <= head.width:
            raise CodingError(
                f"the block at word {first} has {changes} changes, {gaps} planes of gaps and "
                f"{steps} of steps; expected at most {words}, {_GAP_PLANES} and {head.width}"
            )
        sizes = [take(_STORED)[0] for _ in range(gaps + steps)]
        planes = []
        for size in sizes:
            if not 0 < size <= changes or at + size > len(view):
                raise CodingError(
                    f"the block at word {first} has a plane of {size} bytes, expected 1 to "
                    f"{changes} (its changes) and at most the remaining {len(view) - at}"
                )
            planes.append(slice(at, at + size))
            at += size
        yield _Block(first, words, changes, planes[:gaps], planes[gaps:])
    if at != len(view):
        raise CodingError(f"found {len(view) - at} bytes after the last block, expected none")


def _apply_block(view: memoryview, block: _Block, target_W: Words) -> None:
    steps_C = _unzigzag(_values(view, block.steps, block.changes, target_W.dtype))
    if not block.gaps:
        target_W[: block.changes] += steps_C
        return
    positions_C = _values(view, block.gaps, block.changes, np.dtype("<i8"))
    positions_C[1:] += 1
    np.cumsum(positions_C, out=positions_C)
    if positions_C[-1] >= block.words:
        raise CodingError(
            f"the last change of the block at word {block.first} is at position "
            f"{positions_C[-1]}, expected less than {block.words}"
        )
    target_W[positions_C] += steps_C


def _values(view: memoryview, planes: list[slice], count: int, dtype: np.dtype[Any]) -> Any:
    """Return the values whose bytes are in planes; bytes above the last plane are 0."""
    bytes_CB = np.zeros((count, dtype.itemsize), np.uint8)
    for number, place in enumerate(planes):
        stored = view[place]
        if len(stored) < count:
            try:
                stored = _ZSTD.decompress(stored, count, asbytes=True)
            except (OSError, pa.ArrowException) as error:
                raise CodingError(f"decompress a plane of {count} changes: {error}") from error
        bytes_CB[:, number] = np.frombuffer(stored, np.uint8)
    return bytes_CB.view(dtype)[:, 0]
