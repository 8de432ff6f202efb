"""The interface of the object store: what every backend must do, and the errors it must raise."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, Self

from pipeline.errors import LastingError


class StoreError(Exception):
    """A store operation failed; the text names key, operation and store."""


class ObjectMissingError(StoreError):
    """The object does not exist."""


class ObjectExistsError(StoreError):
    """A conditional create found that the object exists."""


class RefusedError(StoreError, LastingError):
    """The request was refused, and would be again: credentials, permissions, a missing bucket, a
    full disk."""


class UnreadableError(StoreError, LastingError):
    """What lies under the key is not read: it is no regular file, or not of the expected size."""


@dataclass(frozen=True)
class ObjectInfo:
    """One listed object. Example: ObjectInfo(key='run.json', size=1834, modified_s=1e9)."""

    key: str
    size: int
    """Bytes."""
    modified_s: float
    """Seconds since the epoch, by the store's clock."""
    upload: str = ""
    """For debris: id of the unfinished upload, where the key alone does not identify it."""
    problem: str = ""
    """Why this is no object, though something has its name: a FIFO, a link that leads nowhere, a
    folder that cannot be read. Reading it is refused. Empty: it is an object."""


def check_key(key: str) -> None:
    """Raise StoreError for a key that leaves the store or cannot be a file's path."""
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise StoreError(f"object key {key!r}: empty or relative parts are not allowed")
    if not key.isprintable():
        raise StoreError(f"object key {key!r}: only characters that can be printed are allowed")


@contextmanager
def file_pieces(path: Path, piece: int, what: str) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Give the size of a local file in bytes, and its content in pieces of at most `piece` bytes.

    Raises StoreError, which begins with `what`, if the file cannot be read or gets shorter
    meanwhile.
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
    """The upload of an object, written piece by piece in bounded memory.

    It is a context manager: leaving the block without `finish` discards what was sent, and no
    object is created.
    """

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes and return their number; may wait until earlier ones are sent."""

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

    Every method may raise StoreError, and no other exception.
    """

    uri: str
    """Canonical URI of the store's root, without a trailing slash."""

    def create(self, key: str, data: bytes) -> None:
        """Create an object, durably, or raise ObjectExistsError and change nothing."""

    def create_from_file(self, key: str, path: Path) -> None:
        """Create an object from a local file, durably, or raise ObjectExistsError."""

    def upload(self, key: str) -> Upload:
        """Create an object piece by piece. Nothing is visible before `finish`."""

    def read(self, key: str, limit: int | None = None) -> bytes:
        """Read the whole object.

        Raises ObjectMissingError; UnreadableError for more than `limit` bytes, and reads none.
        """

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Read `length` bytes from `offset`. Raises ObjectMissingError; StoreError if too short."""

    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], size: int | None = None
    ) -> list[bytes]:
        """Read exactly `length` bytes for each (offset, length), in the order given.

        Where that is faster, neighbouring ranges are fetched together and requests run in parallel.
        Raises the errors of read_range; UnreadableError for an object that has not `size` bytes,
        before room is made for what the ranges ask for.
        """

    def size(self, key: str) -> int | None:
        """The object's size in bytes; None if it does not exist."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List the objects whose keys start with the prefix, in key order.

        What has such a name and is no object is listed too, see ObjectInfo.problem.
        """

    def delete(self, key: str) -> None:
        """Remove an object; nothing happens if it does not exist."""

    def debris(self, prefix: str) -> Iterator[ObjectInfo]:
        """List what unfinished uploads have left: no objects, but it takes space.

        `prefix` is empty or ends in '/'. Uploads in progress are listed too: only `modified_s`, the
        time of the last write, distinguishes them.
        """

    def discard(self, info: ObjectInfo) -> None:
        """Remove an item of `debris`; nothing happens if it is gone or has been finished."""

    def probe(self) -> None:
        """Raise StoreError unless objects can be created here, each key once; leave nothing behind.

        A folder that the first object would make is not made.
        """
