"""The difference file, which contains the changes to a policy's tensors since the previous version.

It is a safetensors file with one entry for each changed tensor, under the tensor's own name. The
entry holds the coded bytes (`coding.py`) as dtype U8. Tensors without an entry are unchanged.
docs/trace-format.md specifies the file.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, BinaryIO

from pipeline.policies.coding import head_of
from pipeline.policies.weights import (
    LARGEST_HEADER,
    LENGTH,
    TensorPlace,
    parse_header,
    weights_header,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

METADATA = {"format": "retrace-difference", "version": "1"}
"""The `__metadata__` of the header. Readers refuse a file with different metadata."""
_PIECE = 16 << 20  # bytes in memory at a time


class DifferenceError(ValueError):
    """The error for a difference file that is damaged or belongs to different tensors."""


class DifferenceWriter:
    """Collects coded tensors, and then returns the content of their difference file in pieces.

    The header comes first and lists all sizes, so the coded tensors are kept in `spool` until all
    of them are known. `spool` must be an empty file or io.BytesIO.
    """

    def __init__(self, spool: BinaryIO) -> None:
        self._spool = spool
        self._places: dict[str, tuple[int, int]] = {}
        self.coded_bytes = 0
        """Total size of the tensors added so far, in bytes."""

    def __len__(self) -> int:
        """Return the number of tensors added so far."""
        return len(self._places)

    def add(self, name: str, coded: bytes) -> None:
        """Add a changed tensor. Raises ValueError if the tensor was already added."""
        if name in self._places:
            raise ValueError(f"tensor {name} is already in this difference; add each tensor once")
        self._spool.write(coded)
        self._places[name] = self.coded_bytes, self.coded_bytes + len(coded)
        self.coded_bytes += len(coded)

    def header(self) -> bytes:
        """Return the bytes before the coded tensors: the header's length and the header."""
        places = (
            TensorPlace(name, "U8", (end - begin,), begin, end)
            for name, (begin, end) in self._places.items()
        )
        return weights_header(list(places), METADATA)

    def pieces(self) -> Iterator[bytes]:
        """Yield the entire file, in order."""
        yield self.header()
        self._spool.seek(0)
        while piece := self._spool.read(_PIECE):
            yield piece

    def write_to(self, file: BinaryIO) -> None:
        """Write the entire file."""
        file.write(self.header())
        self._spool.seek(0)
        shutil.copyfileobj(self._spool, file, _PIECE)


def read_difference(data: "ReadableBuffer") -> dict[str, memoryview]:
    """Return the coded tensors of a complete file, keyed by name, without a copy.

    `data` is the file's bytes or a memory map of it. Raises DifferenceError.
    """
    view = memoryview(data).cast("B")
    length = int.from_bytes(view[:LENGTH], "little")
    begin = LENGTH + length
    if length > LARGEST_HEADER or begin > len(view):
        raise DifferenceError(
            f"found {len(view)} bytes and a header of {length}, expected at most {LARGEST_HEADER} "
            "bytes of header and the coded tensors after it"
        )
    places = difference_places(bytes(view[LENGTH:begin]))
    end = begin + (places[-1].end if places else 0)
    if end != len(view):
        raise DifferenceError(f"found {len(view)} bytes, expected {end} as in the header")
    return {place.name: view[begin + place.begin : begin + place.end] for place in places}


def difference_places(header: bytes) -> list[TensorPlace]:
    """Return the positions of the tensors that a file's header lists. Raises DifferenceError."""
    try:
        places = parse_header(header)
        metadata = json.loads(header).get("__metadata__")
    except (TypeError, ValueError) as error:
        raise DifferenceError(str(error)) from error
    if metadata != METADATA:
        raise DifferenceError(f"found metadata {metadata!r}, expected {METADATA}")
    for place in places:
        if place.dtype != "U8" or place.shape != (place.end - place.begin,):
            raise DifferenceError(
                f"found tensor {place.name} as {place.dtype} of shape {place.shape}, expected its "
                f"{place.end - place.begin} coded bytes as U8"
            )
    return places


def check_fits(difference: Mapping[str, "ReadableBuffer"], sizes: Mapping[str, int]) -> None:
    """Check a difference against the tensors of its base, before any of them is patched.

    `sizes` gives the size of each tensor of the base, in bytes. Raises DifferenceError for a tensor
    that is missing from the base or has a different size there, and CodingError for coded bytes
    without a valid head.
    """
    for name, coded in difference.items():
        if name not in sizes:
            raise DifferenceError(f"found a difference of tensor {name}, which its base lacks")
        head = head_of(coded)
        if head.size != sizes[name]:
            raise DifferenceError(
                f"found a difference of {head.size} bytes of tensor {name}, expected "
                f"{sizes[name]} bytes as in its base"
            )
