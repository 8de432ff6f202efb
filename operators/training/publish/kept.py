"""This rank's tensors of the previous policy version, and their changes in the next one.

The tensors are in a scratch file that is mapped into memory. The kernel keeps the file in its cache
while memory is free, and writes it to the disk when memory runs out. The rank's own memory
therefore stays within `store.policy_buffer_mib`, however large its share is.
"""

import hashlib
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipeline.policies.coding import count_changes, encode
from pipeline.policies.difference import DifferenceWriter
from pipeline.policies.weights import Tensor, TensorPlace
from pipeline.store import StoreError


class ChangeCounts(NamedTuple):
    """Counts of the changes to a rank's tensors. Example: ChangeCounts(30, 912, 411, 40000)."""

    tensors: int
    """Number of changed tensors."""
    coded_bytes: int
    """Size of the coded changes, in bytes."""
    changed: int
    """Number of changed values."""
    values: int
    """Number of values in all of the rank's tensors."""


@dataclass(frozen=True)
class Changes:
    """The changes to a rank's tensors since the previous version."""

    tensors: tuple[Tensor, ...]
    """All of the rank's tensors in the new version."""
    writer: DifferenceWriter
    """The coded changes."""
    names: frozenset[str]
    """The names of the changed tensors."""
    counts: ChangeCounts


class KeptShare:
    """The bytes of a rank's tensors, kept from one version to the next."""

    def __init__(self, folder: Path, files: Sequence[Sequence[TensorPlace]]) -> None:
        """Allocate the scratch file.

        `folder` is this rank's scratch folder; `files` lists the tensors of each weights file.
        Raises StoreError if the disk is too small.
        """
        self._files = files
        self._spool: BinaryIO = (folder / "difference").open("w+b")
        size = sum(tensor.end - tensor.begin for file in files for tensor in file)
        with (folder / "weights").open("w+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, max(1, size))
            except OSError as error:
                raise StoreError(
                    f"cannot allocate {size} bytes in {folder} to keep this rank's share of the "
                    f"policy, which is needed to write the next policy as a difference: {error}; "
                    "free some space, set TMPDIR to a larger disk, or set "
                    "store.policy_deltas.enable=false"
                ) from error
            self._map = mmap.mmap(file.fileno(), max(1, size))

    def update(self, contents: Iterator[memoryview], compare: bool) -> Changes:
        """Replace the tensors with the next version's tensors, and return the changes.

        If `compare` is false, the result contains no changes.
        """
        self._spool.seek(0)
        self._spool.truncate()
        writer = DifferenceWriter(self._spool)
        tensors, names, changed, values = [], set(), 0, 0
        for tensor, kept in self._places():
            content = next(contents)
            digest = hashlib.sha256(content).hexdigest()
            tensors.append(Tensor(tensor.name, tensor.dtype, tensor.shape, digest))
            width = _width(tensor)
            values += kept.nbytes // width
            coded = encode(kept, content, width) if compare else None
            if coded is not None:
                writer.add(tensor.name, coded)
                names.add(tensor.name)
                changed += count_changes(coded)
            kept[:] = content
        counts = ChangeCounts(len(names), writer.coded_bytes, changed, values)
        return Changes(tuple(tensors), writer, frozenset(names), counts)

    def contents(self) -> Iterator[memoryview]:
        """Return the bytes of the tensors, in order."""
        return (kept for _, kept in self._places())

    def _places(self) -> Iterator[tuple[TensorPlace, memoryview]]:
        view, begin = memoryview(self._map), 0
        for file in self._files:
            for tensor in file:
                end = begin + tensor.end - tensor.begin
                yield tensor, view[begin:end]
                begin = end


def _width(tensor: TensorPlace) -> int:
    """Return the size of a value in bytes."""
    values = 1
    for length in tensor.shape:
        values *= length
    return (tensor.end - tensor.begin) // values if values else 1
