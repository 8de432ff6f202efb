"""Weights in safetensors files: are they whole, of which shapes, and with which digests?

Shapes come from headers alone; digests need the whole files, which are read once.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.errors import InputError
from pipeline.model.shapes import Shapes
from pipeline.run.commit import DataFile, sha256_of_file
from pipeline.run.weights import (
    LARGEST_HEADER,
    LENGTH,
    SUFFIX,
    WeightsFile,
    parse_header,
    read_stored_weights,
    read_weights,
    weights_digest,
)
from pipeline.store import Store

_AGAIN = "download it again"
_POINTER = b"version https://git-lfs"
_known: dict[str, WeightsFile] = {}
"""The weights files on this machine that were read, by SHA-256."""


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
        length = int.from_bytes(start[:LENGTH], "little")
        if size < LENGTH or length > min(size - LENGTH, LARGEST_HEADER):
            raise ValueError(
                f"found {size} bytes, expected at least {LENGTH + length}, as its header alone "
                f"has {length}; {_AGAIN}"
            )
        source.seek(LENGTH)
        header = source.read(length)
    try:
        tensors = parse_header(header)
    except ValueError as error:
        raise ValueError(f"{error}; {_AGAIN}") from error
    expected = LENGTH + length + max((tensor.end for tensor in tensors), default=0)
    if size != expected:
        raise ValueError(f"found {size} bytes, expected {expected} from its header; {_AGAIN}")
    return {tensor.name: tensor.shape for tensor in tensors}


def digest_of(path: Path) -> str:
    """Hex SHA-256 of a local file, computed once as long as the file does not change."""
    status = path.stat()
    return _digest_of(path, status.st_size, status.st_mtime_ns)


def weights_of_local(paths: Iterable[Path]) -> str:
    """The weights digest of local files, each read once as long as it does not change.

    Raises ValueError for a tensor in two files.
    """
    return weights_digest(_known[digest_of(path)] for path in paths)


def weights_of_staged(store: Store, files: Iterable[DataFile]) -> str:
    """The weights digest of staged files.

    A file is read from the store unless `digest_of` has read the same one here. Raises
    CorruptObjectError, ObjectMissingError, StoreError; ValueError for a tensor in two files.
    """
    weights = (file for file in files if file.key.endswith(SUFFIX))
    return weights_digest(_known.get(f.sha256) or read_stored_weights(store, f) for f in weights)


@functools.cache
def _digest_of(path: Path, size: int, modified_ns: int) -> str:
    if path.suffix != SUFFIX:
        return sha256_of_file(path)
    found = read_weights(path)
    _known[found.sha256] = found
    return found.sha256
