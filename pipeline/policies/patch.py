"""Applying differences in place to the tensors of a folder's safetensors files.

difference file, mapped ──► coded tensor ─┐
folder's file, mapped ────────────────────┴─► patched in place ──► SHA-256, compared
"""

import hashlib
import mmap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pipeline.policies.coding import apply
from pipeline.policies.difference import check_fits, read_difference
from pipeline.policies.weights import LARGEST_HEADER, LENGTH, SUFFIX, Tensor, parse_header
from pipeline.threads import in_threads

_MOST_THREADS = 8


def folder_tensors(folder: Path) -> dict[str, memoryview]:
    """Return writable views of the tensors in a folder's safetensors files, keyed by name.

    Writing to a view changes its file. Raises OSError, and ValueError for an incomplete file.
    """
    found: dict[str, memoryview] = {}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        with path.open("r+b") as file:
            view = memoryview(mmap.mmap(file.fileno(), 0))
        length = int.from_bytes(view[:LENGTH], "little")
        begin = LENGTH + length
        if length > LARGEST_HEADER or begin > len(view):
            raise ValueError(
                f"{path}: found {len(view)} bytes and a header of {length}, expected at most "
                f"{LARGEST_HEADER} bytes of header, inside the file"
            )
        places = parse_header(bytes(view[LENGTH:begin]))
        end = begin + max((place.end for place in places), default=0)
        if end != len(view):
            raise ValueError(f"{path}: found {len(view)} bytes, expected {end} as in its header")
        found |= {at.name: view[begin + at.begin : begin + at.end] for at in places}
    return found


def difference_tensors(files: Iterable[Path]) -> dict[Path, dict[str, memoryview]]:
    """Return the coded tensors of each difference file, keyed by tensor name.

    Raises OSError, or a ValueError that names the file.
    """
    found = {}
    for path in files:
        with path.open("rb") as file:
            try:
                found[path] = read_difference(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            except ValueError as error:
                raise ValueError(f"{path.name}: {error}") from error
    return found


def patch(targets: Mapping[str, memoryview], coded: Mapping[str, memoryview]) -> None:
    """Patch tensors in place, several at a time. After an error, the tensors belong to no version.

    If a difference does not fit its tensor, raises a ValueError that names the tensor.
    """
    check_fits(coded, {name: len(view) for name, view in targets.items()})

    def patched(name: str) -> None:
        try:
            apply(coded[name], targets[name])
        except ValueError as error:
            raise ValueError(f"tensor {name}: {error}") from error

    in_threads(patched, sorted(coded), _MOST_THREADS)


def check_digests(targets: Mapping[str, memoryview], tensors: Sequence[Tensor]) -> None:
    """Raise ValueError for the first tensor whose bytes do not have the listed digest."""

    def check(tensor: Tensor) -> None:
        found = hashlib.sha256(targets[tensor.name]).hexdigest()
        if found != tensor.sha256:
            raise ValueError(
                f"tensor {tensor.name} has SHA-256 {found[:16]}... after patching, expected "
                f"{tensor.sha256[:16]}... as in its share"
            )

    in_threads(check, tensors, _MOST_THREADS)
