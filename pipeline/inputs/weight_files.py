"""Weights in safetensors files: are they whole, and how many are there? Only headers are read.

A file is the length of its header (8 bytes, little-endian), the header (a JSON object: of each
tensor its type, shape and `data_offsets`), and the tensors' bytes without gaps.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import InputError

_LENGTH = 8
_AGAIN = "download it again"
_POINTER = b"version https://git-lfs"
_LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""


@dataclass(frozen=True)
class WeightFile:
    """What the header of a whole file says."""

    tensors: frozenset[str]
    parameters: int
    """Numbers in all tensors."""


def check_weights(
    key: str, folder: Path, names: Sequence[str], weight_map: Mapping[str, str]
) -> int:
    """The number of parameters in a model's weight files, after looking whether they are whole.

    `weight_map` says which file has which tensor, as the model's index does; {} without an index.
    Raises InputError, whose messages begin with `key`, with the problems of all files.
    """
    problems: list[str] = []
    found: dict[str, WeightFile] = {}
    for name in names:
        try:
            found[name] = read_weight_file(folder / name)
        except ValueError as error:
            problems.append(f"{key}: {folder / name} is damaged: {error}")
    for name, file in found.items():
        lacking = sorted(t for t, where in weight_map.items() if where == name)
        lacking = [tensor for tensor in lacking if tensor not in file.tensors]
        if lacking:
            problems.append(
                f"{key}: {folder / name} lacks {len(lacking)} tensors which the model's index "
                f"says it has, the first is {lacking[0]}; download the model again"
            )
    if problems:
        raise InputError(problems)
    return sum(file.parameters for file in found.values())


def read_weight_file(path: Path) -> WeightFile:
    """What a file's header says, once its tensors are known to fill the file exactly.

    Raises ValueError with what was found and expected.
    """
    size = path.stat().st_size
    with path.open("rb") as source:
        start = source.read(len(_POINTER))
        if start == _POINTER:
            raise ValueError("it is a pointer of Git LFS, not the file; run `git lfs pull` there")
        length = int.from_bytes(start[:_LENGTH], "little")
        if size < _LENGTH or length > min(size - _LENGTH, _LARGEST_HEADER):
            raise ValueError(
                f"found {size} bytes, expected at least {_LENGTH + length}, as its header alone "
                f"has {length}; {_AGAIN}"
            )
        source.seek(_LENGTH)
        header = source.read(length)
    tensors = _tensors(header)
    end = 0
    for name, (_, begin, stop) in sorted(tensors.items(), key=lambda item: item[1][1:]):
        if begin != end or stop < begin:
            raise ValueError(
                f"the bytes of its tensor {name} are {begin} to {stop}, expected to begin at "
                f"{end}; {_AGAIN}"
            )
        end = stop
    if size != _LENGTH + length + end:
        raise ValueError(
            f"found {size} bytes, expected {_LENGTH + length + end} from its header; {_AGAIN}"
        )
    return WeightFile(frozenset(tensors), sum(count for count, _, _ in tensors.values()))


def _tensors(header: bytes) -> dict[str, tuple[int, int, int]]:
    """Of each tensor: how many numbers it has, and the range of its bytes."""
    try:
        content: dict[str, Any] = json.loads(header)
        return {
            name: (math.prod(tensor["shape"]), *_range(tensor["data_offsets"]))
            for name, tensor in content.items()
            if name != "__metadata__"
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header does not describe tensors: {error!r}; {_AGAIN}") from error


def _range(offsets: list[int]) -> tuple[int, int]:
    begin, stop = offsets
    return int(begin), int(stop)
