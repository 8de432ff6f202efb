"""The weights digest of a policy, which does not depend on how tensors are divided among files.

A safetensors file has three parts: the length of its header (8 bytes, little-endian), the header,
and the tensors' bytes without gaps. The header is a JSON object with the dtype, shape and
`data_offsets` of each tensor. docs/trace-format.md defines the digest.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pipeline.run.commit import CorruptObjectError, DataFile, canonical
from pipeline.run.parse import Count, convert, typed
from pipeline.store.base import Store

LENGTH = 8
"""Size in bytes of the field that contains the header's length."""
LARGEST_HEADER = 100_000_000
"""Maximum size of a header in bytes, as limited by the safetensors format."""
SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
"""The file that maps tensors to weights files; absent from a folder with one weights file."""
_ALIGNMENT = 8
"""Alignment in bytes: the first tensor begins at a multiple of this number, so that the file can be
mapped into memory."""
_PIECE = 16 << 20  # bytes in memory at a time
_MOST_AXES = 64
"""Maximum number of axes of a tensor, as in PyTorch and numpy."""
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}
"""The size in bits of a value of each dtype of the safetensors format."""


class TensorPlace(NamedTuple):
    """A tensor in a file's header. Example: TensorPlace('lm_head.weight', 'BF16', (32, 8), 0, 512).

    `begin` and `end` count bytes from the end of the header.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class _Described(msgspec.Struct):
    """The JSON form of a tensor's place."""

    dtype: str
    shape: tuple[Count, ...]
    data_offsets: tuple[int, int]


class Tensor(NamedTuple):
    """A tensor with the SHA-256 of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str


@dataclass(frozen=True)
class WeightsFile:
    """The digests of a weights file and of its tensors, from one pass over the file."""

    sha256: str
    """The SHA-256 of the entire file."""
    tensors: tuple[Tensor, ...]
    """The tensors in the order of their bytes."""


def weights_digest(files: Iterable[WeightsFile]) -> str:
    """Return the weights digest of a policy. Raises ValueError for a tensor in two files."""
    return tensors_digest(tensor for file in files for tensor in file.tensors)


def tensors_digest(tensors: Iterable[Tensor]) -> str:
    """Return the weights digest of some tensors. Raises ValueError if a tensor is listed twice."""
    ordered = sorted(tensors)
    for one, other in itertools.pairwise(ordered):
        if one.name == other.name:
            raise ValueError(f"tensor {one.name} is in two files; write each tensor once")
    listed = [[t.name, t.dtype, list(t.shape), t.sha256] for t in ordered]
    return hashlib.sha256(canonical(listed).encode()).hexdigest()


def weights_files(folder: Path) -> list[Path]:
    """Return the safetensors files in a folder, sorted by name.

    Raises ValueError if the folder's index is malformed, or lists a file that is missing.
    """
    found = sorted(folder.glob(f"*{SUFFIX}"))
    index = folder / INDEX
    if index.is_file():
        try:
            names = {*typed(json.loads(index.read_bytes()), "weight_map", dict[str, str]).values()}
        except ValueError as error:
            raise ValueError(f"{index}: {error}; write or download the file again") from error
        if missing := sorted(names - {file.name for file in found}):
            raise ValueError(
                f"no file {missing[0]}, expected {len(names)} files as in {INDEX}; write or "
                "download the missing files"
            )
    return found


def read_weights(path: Path) -> WeightsFile:
    """Compute the digests of a file on this machine.

    Raises ValueError if it is incomplete, malformed or not a regular file.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: not a regular file, expected a safetensors file")
    try:
        with path.open("rb") as source:
            return scan_weights(iter(lambda: source.read(_PIECE), b""))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; write or download the file again") from error


def read_stored_weights(store: Store, file: DataFile) -> WeightsFile:
    """Compute the digests of a data file in the store, in bounded memory.

    Args:
        store: The store of the run.
        file: The data file.

    Raises:
        CorruptObjectError: The data is not a complete safetensors file, or does not have the digest
            of `file`.
        ObjectMissingError: The file is missing.
        StoreError: The store cannot be read.
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
            f"{name}: found SHA-256 {found.sha256[:16]}..., expected {file.sha256[:16]}... as in "
            "its commit; restore the object"
        )
    return found


def scan_weights(pieces: Iterable[bytes]) -> WeightsFile:
    """Compute the digests of a file that arrives in pieces.

    Raises ValueError for a file that is not a complete safetensors file.
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
        raise ValueError("it has more bytes than the tensors in its header")
    return WeightsFile(source.sha256.hexdigest(), tuple(tensors))


def weights_header(
    tensors: Sequence[TensorPlace], metadata: Mapping[str, str] = {"format": "pt"}
) -> bytes:
    """Return the bytes before the tensors of a safetensors file: the header after its length."""
    of_tensors = {
        t.name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.begin, t.end]}
        for t in tensors
    }
    text = json.dumps({"__metadata__": dict(metadata), **of_tensors}, separators=(",", ":"))
    header = text.encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return len(header).to_bytes(LENGTH, "little") + header


def parse_header(header: bytes) -> list[TensorPlace]:
    """Return the tensors in a header, in the order of their bytes.

    Raises ValueError for a malformed header, for tensors that overlap or leave gaps, and for a
    tensor whose number of bytes does not match its dtype and shape.
    """
    try:
        content = convert(json.loads(header), dict[str, Any])
        content.pop("__metadata__", None)
        described = convert(content, dict[str, _Described]).items()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header does not describe tensors: {error}") from error
    found = [TensorPlace(name, of.dtype, of.shape, *of.data_offsets) for name, of in described]
    found.sort(key=lambda tensor: (tensor.begin, tensor.end))
    expected = 0
    for tensor in found:
        if tensor.begin != expected or tensor.end < tensor.begin:
            raise ValueError(
                f"its tensor {tensor.name} has bytes {tensor.begin} to {tensor.end}, expected "
                f"them to begin at {expected}"
            )
        _check_size(tensor)
        expected = tensor.end
    return found


def _check_size(tensor: TensorPlace) -> None:
    """Raise ValueError unless a tensor has as many bytes as its dtype and shape require."""
    if tensor.dtype not in _BITS:
        raise ValueError(
            f"its tensor {tensor.name} has the dtype {tensor.dtype}, expected one of "
            f"{', '.join(_BITS)}"
        )
    if len(tensor.shape) > _MOST_AXES:
        raise ValueError(
            f"its tensor {tensor.name} has {len(tensor.shape)} axes, expected at most {_MOST_AXES}"
        )
    size, bits = tensor.end - tensor.begin, math.prod(tensor.shape) * _BITS[tensor.dtype]
    if 8 * size != bits:
        expected = bits // 8 if bits % 8 == 0 else bits / 8
        raise ValueError(
            f"its tensor {tensor.name} has {size} bytes, expected {expected} for {tensor.dtype} of "
            f"shape {tensor.shape}"
        )


class _Source:
    """A reader of bytes that arrive in pieces; it also computes the digest of all bytes."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.sha256 = hashlib.sha256()
        self._pieces = iter(pieces)
        self._rest = memoryview(b"")

    def parts(self, length: int) -> Iterator[memoryview]:
        """Yield the next `length` bytes in parts. Raises ValueError if there are fewer."""
        while length:
            if self.at_end():
                raise ValueError(f"it ends {length} bytes too early")
            part = self._rest[:length]
            self._rest = self._rest[len(part) :]
            length -= len(part)
            yield part

    def read(self, length: int) -> bytes:
        """Return the next `length` bytes. Raises ValueError if there are fewer."""
        return b"".join(self.parts(length))

    def at_end(self) -> bool:
        """Return whether all bytes have been read."""
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return True
            self.sha256.update(piece)
            self._rest = memoryview(piece)
        return False
