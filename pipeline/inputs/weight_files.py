"""Weights in safetensors files: are they whole, and of which shapes? Only headers are read.

A file is the length of its header (8 bytes, little-endian), the header (a JSON object: of each
tensor its type, shape and `data_offsets`), and the tensors' bytes without gaps.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.model.shapes import Shapes

_LENGTH = 8
_AGAIN = "download it again"
_POINTER = b"version https://git-lfs"
_LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""


def check_weights(
    key: str, folder: Path, names: Sequence[str], weight_map: Mapping[str, str]
) -> Shapes:
    """The shapes of the tensors in a model's weight files, once these are known to be whole.

    `weight_map` says which file has which tensor, as the model's index does; {} without an index.
    Raises InputError, whose messages begin with `key`, with the problems of all files.
    """
    problems: list[str] = []
    found: dict[str, Shapes] = {}
    for name in names:
        try:
            found[name] = read_shapes(folder / name)
        except ValueError as error:
            problems.append(f"{key}: {folder / name} is damaged: {error}")
    for name, shapes in found.items():
        lacking = sorted(t for t, where in weight_map.items() if where == name)
        lacking = [tensor for tensor in lacking if tensor not in shapes]
        if lacking:
            problems.append(
                f"{key}: {folder / name} lacks {len(lacking)} tensors which the model's index "
                f"says it has, the first is {lacking[0]}; download the model again"
            )
    if problems:
        raise InputError(problems)
    return {tensor: shape for shapes in found.values() for tensor, shape in shapes.items()}


def read_shapes(path: Path) -> Shapes:
    """The shapes of a file's tensors, once these are known to fill the file exactly.

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
    return {name: shape for name, (shape, _, _) in tensors.items()}


def _tensors(header: bytes) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Of each tensor: its shape, and the range of its bytes."""
    try:
        content: dict[str, Any] = json.loads(header)
        return {
            name: (tuple(map(int, tensor["shape"])), *_range(tensor["data_offsets"]))
            for name, tensor in content.items()
            if name != "__metadata__"
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header does not describe tensors: {error!r}; {_AGAIN}") from error


def _range(offsets: list[int]) -> tuple[int, int]:
    begin, stop = offsets
    return int(begin), int(stop)
