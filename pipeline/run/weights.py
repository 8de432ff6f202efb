"""The digest of a policy's weights: of its tensors, however they are cut into safetensors files.

A safetensors file is the length of its header (8 bytes, little-endian), the header (a JSON object:
of each tensor its type, shape and `data_offsets`), and the tensors' bytes without gaps.
docs/trace-format.md says what the digest is taken of.
"""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pipeline.run.commit import CorruptObjectError, DataFile
from pipeline.run.parse import integer, items, mapping, number, text
from pipeline.run.strict_json import canonical, parse_json
from pipeline.store.base import Store

LENGTH = 8
"""Bytes of a header's length."""
LARGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
SUFFIX = ".safetensors"
_PIECE = 16 << 20  # bytes in memory at a time


class TensorPlace(NamedTuple):
    """A tensor by a file's header. Example: TensorPlace('lm_head.weight', 'BF16', (32, 8), 0, 512).

    `begin` and `end` count bytes from the end of the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Tensor(NamedTuple):
    """A tensor with the SHA-256 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class WeightsFile:
    """What one pass over a weights file finds."""

    sha256: str
    """Of the whole file."""
    tensors: tuple[Tensor, ...]
    """In the order of their bytes."""


def weights_digest(files: Iterable[WeightsFile]) -> str:
    """The weights digest of a policy. Raises ValueError for a tensor that is in two files."""
    tensors = sorted(tensor for file in files for tensor in file.tensors)
    for one, other in itertools.pairwise(tensors):
        if one.name == other.name:
            raise ValueError(f"tensor {one.name} is in two files; write each tensor once")
    listed = [[t.name, t.dtype, list(t.shape), t.sha256] for t in tensors]
    return hashlib.sha256(canonical(listed).encode()).hexdigest()


def read_weights(path: Path) -> WeightsFile:
    """Take the digests of a file on this machine. Raises ValueError when it is not whole."""
    try:
        with path.open("rb") as source:
            return scan_weights(iter(lambda: source.read(_PIECE), b""))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_stored_weights(store: Store, file: DataFile) -> WeightsFile:
    """Take the digests of a data file in the store, in bounded memory.

    Raises CorruptObjectError when it is no whole safetensors file, or another one than `file` says;
    ObjectMissingError; StoreError.
    """
    name = f"{file.key} in {store.uri}"
    starts = range(0, file.size, _PIECE)
    pieces = (store.read_range(file.key, at, min(_PIECE, file.size - at)) for at in starts)
    try:
        found = scan_weights(pieces)
    except ValueError as error:
        raise CorruptObjectError(f"{name}: {error}; restore the object") from error
    if found.sha256 != file.sha256:
        raise CorruptObjectError(
            f"{name}: SHA-256 {found.sha256[:16]}..., its commit says {file.sha256[:16]}...; "
            "restore the object"
        )
    return found


def scan_weights(pieces: Iterable[bytes]) -> WeightsFile:
    """Take the digests of a file that comes in pieces.

    Raises ValueError with what was found and expected.
    """
    source = _Source(pieces)
    length = int.from_bytes(source.read(LENGTH), "little")
    if length > LARGEST_HEADER:
        raise ValueError(f"its header has {length} bytes, expected at most {LARGEST_HEADER}")
    tensors = []
    for name, dtype, shape, begin, end in parse_header(source.read(length)):
        digest = hashlib.sha256()
        for part in source.parts(end - begin):
            digest.update(part)
        tensors.append(Tensor(name, dtype, shape, digest.hexdigest()))
    if not source.at_end():
        raise ValueError("it goes on after the last tensor of its header")
    return WeightsFile(source.sha256.hexdigest(), tuple(tensors))


def parse_header(header: bytes) -> list[TensorPlace]:
    """The tensors of a header in the order of their bytes, which must be without gaps.

    Raises ValueError.
    """
    try:
        content = mapping(parse_json(header))
        found = [_place(name, of) for name, of in content.items() if name != "__metadata__"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"its header does not describe tensors: {error!r}") from error
    found.sort(key=lambda tensor: (tensor.begin, tensor.end))
    expected = 0
    for tensor in found:
        if tensor.begin != expected or tensor.end < tensor.begin:
            raise ValueError(
                f"the bytes of its tensor {tensor.name} are {tensor.begin} to {tensor.end}, "
                f"expected to begin at {expected}"
            )
        expected = tensor.end
    return found


class _Source:
    """Bytes in pieces, read in order; the digest of all of them."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.sha256 = hashlib.sha256()
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def parts(self, length: int) -> Iterator[memoryview]:
        """The next bytes, in parts."""
        while length:
            if self.at_end():
                raise ValueError(f"it ends {length} bytes too early")
            part = self._rest[:length]
            self._rest = self._rest[len(part) :]
            length -= len(part)
            yield part

    def read(self, length: int) -> bytes:
        """The next bytes."""
        return b"".join(self.parts(length))

    def at_end(self) -> bool:
        """Whether no byte is left."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self.sha256.update(piece)
            self._rest = memoryview(piece)
        return False


def _place(name: str, tensor: object) -> TensorPlace:
    of = mapping(tensor)
    shape = tuple(number(n) for n in items(of["shape"]))
    begin, end = (integer(at) for at in items(of["data_offsets"]))
    return TensorPlace(name, text(of["dtype"]), shape, begin, end)
