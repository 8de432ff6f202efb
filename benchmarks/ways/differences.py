"""Four codings of the exact difference between two versions of a tensor; the first is Retrace's.

A coding has two functions: one codes the difference between all old and new words of a tensor, and
the other changes the old words into the new ones in place. Like Retrace's coding, the other codings
work on blocks of a million words and compress with zstd at level 1. The step of a word is its new
value minus its old value.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.policies.coding import BLOCK, apply, encode

Words = npt.NDArray[Any]
_ZSTD = pa.Codec("zstd", compression_level=1)


class Way(NamedTuple):
    """A coding: functions that code and apply a difference."""

    name: str
    code: Callable[[Words, Words], list[Any]]
    patch: Callable[[list[Any], Words], None]


def size(coded: list[Any]) -> int:
    """Return the size of coded data, excluding the few bytes needed to store its lengths."""
    return sum(len(part) for part in coded if isinstance(part, bytes))


def _blocks(words: Words) -> Iterator[slice]:
    return (slice(first, first + BLOCK) for first in range(0, words.size, BLOCK))


def _pack(array: Words) -> bytes:
    packed: bytes = _ZSTD.compress(np.ascontiguousarray(array), asbytes=True)
    return packed


def _unpack(data: bytes, dtype: Any, count: int) -> Words:
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer(_ZSTD.decompress(data, size, asbytes=True), dtype)


def _code_ours(old: Words, new: Words) -> list[Any]:
    """Code the gaps between changed words and the steps of these words, both as byte planes."""
    coded = encode(old, new, old.itemsize)
    return [] if coded is None else [coded]


def _patch_ours(coded: list[Any], target: Words) -> None:
    for part in coded:
        apply(part, target)


def _code_bitmap(old: Words, new: Words) -> list[Any]:
    """Code a bit for each word, and the steps of changed words without further coding."""
    parts: list[Any] = []
    for block in _blocks(old):
        steps = new[block] - old[block]
        changed = steps != 0
        found = steps[changed]
        parts += [_pack(np.packbits(changed)), _pack(found), found.size]
    return parts


def _patch_bitmap(coded: list[Any], target: Words) -> None:
    for number, block in enumerate(_blocks(target)):
        bits, steps, count = coded[3 * number : 3 * number + 3]
        words = target[block]
        map_ = np.unpackbits(_unpack(bits, np.uint8, -(-words.size // 8)), count=words.size)
        words[map_.view(np.bool_)] += _unpack(steps, target.dtype, count)


def _code_xor(old: Words, new: Words) -> list[Any]:
    """Code the changed bits of every word."""
    return [_pack(old[block] ^ new[block]) for block in _blocks(old)]


def _patch_xor(coded: list[Any], target: Words) -> None:
    for part, block in zip(coded, _blocks(target), strict=True):
        words = target[block]
        words ^= _unpack(part, target.dtype, words.size)


def _code_xor_planes(old: Words, new: Words) -> list[Any]:
    """Code the changed bits as planes: the lowest byte of all words, then the next byte."""
    parts: list[Any] = []
    for block in _blocks(old):
        bytes_ = (old[block] ^ new[block]).view(np.uint8).reshape(-1, old.itemsize)
        parts += [_pack(bytes_[:, plane]) for plane in range(old.itemsize)]
    return parts


def _patch_xor_planes(coded: list[Any], target: Words) -> None:
    for number, block in enumerate(_blocks(target)):
        words = target[block]
        bytes_ = words.view(np.uint8).reshape(-1, target.itemsize)
        for plane in range(target.itemsize):
            part = coded[number * target.itemsize + plane]
            bytes_[:, plane] ^= _unpack(part, np.uint8, words.size)


OURS = Way("gaps, steps", _code_ours, _patch_ours)
WAYS = (
    OURS,
    Way("bitmap, steps", _code_bitmap, _patch_bitmap),
    Way("XOR", _code_xor, _patch_xor),
    Way("XOR, by planes", _code_xor_planes, _patch_xor_planes),
)
