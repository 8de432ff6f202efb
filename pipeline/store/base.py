"""The object store seam: what every backend must do, and the errors it must raise."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self


class StoreError(Exception):
    """The object store did not do what was asked; the text says key, operation and store."""


class ObjectMissingError(StoreError):
    """The object does not exist."""


class ObjectExistsError(StoreError):
    """A conditional create found the object there already."""


class RefusedError(StoreError):
    """The request was refused, and would be again: credentials, permissions, a missing bucket."""


@dataclass(frozen=True)
class ObjectInfo:
    """One listed object. Example: ObjectInfo(key='run.json', size=1834, modified_s=1e9)."""

    key: str
    size: int
    """Bytes."""
    modified_s: float
    """Seconds since the epoch, by the store's clock."""
    upload: str = ""
    """Of debris: which unfinished upload it is, where the key alone does not say it."""


def check_key(key: str) -> None:
    """Raise StoreError for a key that would leave the store, or not survive as a file's path."""
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise StoreError(f"object key {key!r}: empty or relative parts are not allowed")
    if not key.isprintable():
        raise StoreError(f"object key {key!r}: only characters that can be printed are allowed")


@contextmanager
def file_pieces(path: Path, piece: int, what: str) -> Iterator[tuple[int, Iterator[bytes]]]:
    """(bytes of a local file, its content in pieces of at most `piece` bytes).

    Raises StoreError, which begins with `what`, if the file cannot be read or is cut off meanwhile.
    """

    def pieces(source: BinaryIO, size: int) -> Iterator[bytes]:
        while size:
            try:
                data = source.read(min(piece, size))
            except OSError as error:
                raise StoreError(f"{what}: {error}") from error
            if not data:
                raise StoreError(f"{what}: {path} became {size} bytes shorter while it was read")
            size -= len(data)
            yield data

    try:
        source = path.open("rb")
    except OSError as error:
        raise StoreError(f"{what}: {error}") from error
    with source:
        size = os.fstat(source.fileno()).st_size
        yield size, pieces(source, size)


class Upload(Protocol):
    """An object on its way into the store, written piece by piece in bounded memory.

    It is a context: when the block is left without `finish`, what was sent is taken back and there
    is no object.
    """

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes and return how many; may wait for earlier ones to be sent."""

    def finish(self) -> None:
        """Create the object, durably, or raise ObjectExistsError and change nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Store(Protocol):
    """Flat objects under '/'-separated keys. Objects are written once and never changed.

    Every method may raise StoreError. Nothing else leaves a backend.
    """

    uri: str
    """Canonical URI of the store's root, without a trailing slash."""

    def create(self, key: str, data: bytes) -> None:
        """Create an object, durably, or raise ObjectExistsError and change nothing."""

    def create_from_file(self, key: str, path: Path) -> None:
        """Create an object from a local file, durably, or raise ObjectExistsError."""

    def upload(self, key: str) -> Upload:
        """Create an object piece by piece. Nothing is visible before `finish`."""

    def read(self, key: str) -> bytes:
        """The whole object. Raises ObjectMissingError."""

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises ObjectMissingError; StoreError if short."""

    def read_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Exactly `length` bytes for each (offset, length), in the order given.

        Neighbours are fetched together and several requests run at once, where that is faster.
        Raises as read_range.
        """

    def size(self, key: str) -> int | None:
        """Bytes of the object, None if there is none."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key starts with the prefix, in key order."""

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if there is none."""

    def debris(self, prefix: str) -> Iterator[ObjectInfo]:
        """What uploads that were never finished have left: no objects, but they take space.

        `prefix` is empty or ends in '/'. An upload that is still going on is among them: only its
        `modified_s`, when something was last written to it, tells.
        """

    def discard(self, info: ObjectInfo) -> None:
        """Remove an item of `debris`; nothing happens if it is gone, or was finished since."""

    def probe(self) -> None:
        """Raise StoreError unless objects can be created here, each name once; leaves nothing.

        A place that does not exist yet and would be made by the first object is not made.
        """
