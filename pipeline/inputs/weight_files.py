"""Completeness, shapes and digests of weights in safetensors files.

For shapes, only the headers are read. For digests, each file is read once, in full.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.errors import InputError
from pipeline.model.shapes import Shapes
from pipeline.policies.weights import (
    LARGEST_HEADER,
    LENGTH,
    SUFFIX,
    WeightsFile,
    parse_header,
    read_stored_weights,
    read_weights,
    weights_digest,
)
from pipeline.run.commit import DataFile, sha256_of_file
from pipeline.store import Store

_AGAIN = "download it again"
_POINTER = b"version https://git-lfs"
_known: dict[str, WeightsFile] = {}
"""The digests of the local weight files that have been read, keyed by the file's SHA-256."""


def check_weights(
    key: str, folder: Path, names: Sequence[str], weight_map: Mapping[str, str]
) -> Shapes:
    """Check that a model's weight files are complete, and return the shapes of their tensors.

    Args:
        key: The setting that names the model, for messages.
        folder: The model's folder.
        names: Names of the weight files.
        weight_map: The file that holds each tensor, from the model's index; {} if there is none.

    Raises:
        InputError: A file is damaged, or lacks a tensor that the index lists for it. The error
            lists the problems with all files.
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
                f"{key}: {folder / name} lacks {len(lacking)} tensors that the model's index lists "
                f"for it; the first is {lacking[0]}; download the model again"
            )
    if problems:
        raise InputError(problems)
    return {tensor: shape for shapes in found.values() for tensor, shape in shapes.items()}


def read_shapes(path: Path) -> Shapes:
    """Check that a file's tensors fill it exactly, and return their shapes.

    Raises a ValueError that describes the problem.
    """
    size = path.stat().st_size
    with path.open("rb") as source:
        start = source.read(len(_POINTER))
        if start == _POINTER:
            raise ValueError("a Git LFS pointer instead of the file; run `git lfs pull` there")
        length = int.from_bytes(start[:LENGTH], "little")
        if size < LENGTH or length > min(size - LENGTH, LARGEST_HEADER):
            raise ValueError(
                f"found {size} bytes, expected at least {LENGTH + length}, because its header "
                f"alone has {length}; {_AGAIN}"
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
    """Return the hex SHA-256 of a local file, computed again only if the file has changed."""
    status = path.stat()
    return _digest_of(path, status.st_size, status.st_mtime_ns)


def weights_of_local(paths: Iterable[Path]) -> str:
    """Return the weights digest of local files, reading a file again only if it has changed.

    Raises ValueError if two files contain the same tensor.
    """
    return weights_digest(_known[digest_of(path)] for path in paths)


def weights_of_staged(store: Store, files: Iterable[DataFile]) -> str:
    """Return the weights digest of staged files.

    A file is read from the store unless `digest_of` has already read a local file with the same
    content. Raises CorruptObjectError, ObjectMissingError or StoreError, and ValueError if two
    files contain the same tensor.
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
