"""The interface that every backend of the object store must implement, and its errors."""

import errno
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from pipeline.errors import LastingError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Error numbers of a full disk and of a used-up quota."""
_PIECE = 1 << 20


class StoreError(Exception):
    """A store operation failed. The message names the operation, the key and the store."""


class ObjectMissingError(StoreError):
    """The object does not exist."""


class ObjectExistsError(StoreError):
    """The object to create already exists."""


class RefusedError(StoreError, LastingError):
    """The store refused the request and would refuse it again: invalid credentials, missing
    permissions, a missing bucket or a full disk."""


class UnreadableError(StoreError, LastingError):
    """The object does not have the expected size."""


@dataclass(frozen=True)
class ObjectInfo:
    """One listed object. Example: ObjectInfo(key='run.json', size=1834, modified_s=1e9)."""

    key: str
    size: int
    """Size in bytes."""
    modified_s: float
    """Seconds since the epoch, by the store's clock."""
    upload: str = ""
    """For debris: the id of the unfinished upload, if the key does not identify the upload."""


def check_key(key: str) -> None:
    """Raise StoreError for a key that leads out of the store or cannot be a file's path."""
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise StoreError(f"object key {key!r}: empty or relative parts are not allowed")
    if not key.isprintable():
        raise StoreError(f"object key {key!r}: only printable characters are allowed")


class Upload(Protocol):
    """The upload of a data object, written piece by piece in bounded memory.

    An upload is a context manager. Leaving the block without `finish` discards the data and creates
    no object.
    """

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes and return how many there were.

        The call may wait until earlier bytes have been sent.
        """

    def finish(self) -> None:
        """Create the object durably; see Store.upload."""

    def leave(self) -> None:
        """Discard the data, unless `finish` has created the object."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()


class Store(Protocol):
    """A flat set of objects under '/'-separated keys. Objects are written once and never changed.

    Backends derive from this class, and implement every method without a body.

    A commit is created only if it does not exist, because several writers may try to write it. The
    key of a data object contains a random write id or the digest of its content, so writing it
    needs no condition.

    Methods raise StoreError and no other exceptions. A store can be pickled, and a forked child can
    use the store of its parent.
    """

    uri: str
    """Canonical URI of the store's root, without a trailing slash."""

    def create(self, key: str, data: bytes) -> None:
        """Create a small object durably, or raise ObjectExistsError and change nothing."""

    def upload_file(self, key: str, path: Path) -> None:
        """Durably create a data object of any size from a local file; see `upload`."""
        try:
            with path.open("rb") as source, self.upload(key) as upload:
                while piece := source.read(_PIECE):
                    upload.write(piece)
                upload.finish()
        except OSError as error:
            raise StoreError(f"create {key} in {self.uri}: {error}") from error

    def upload(self, key: str) -> Upload:
        """Create a data object of any size piece by piece. It is visible only after `finish`.

        The key must be unique to this content. If the object exists, a store may replace it or
        raise ObjectExistsError.
        """

    def read(self, key: str, limit: int | None = None) -> bytes:
        """Read the entire object.

        Raises ObjectMissingError. For an object of more than `limit` bytes, raises UnreadableError
        without reading it.
        """

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """Read `length` bytes of an object.

        Args:
            key: The object.
            offset: First byte.
            length: Number of bytes.

        Raises:
            ObjectMissingError: The object does not exist.
            StoreError: The object ends before the range does.
        """
        return self.read_ranges(key, [(offset, length)])[0]

    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], size: int | None = None
    ) -> list[bytes]:
        """Read several ranges of an object.

        Neighbouring ranges may share a request, and requests may run in parallel, if this makes
        reading faster.

        Args:
            key: The object.
            ranges: Offset and length of each range, in bytes.
            size: Expected size of the object in bytes; None allows any size.

        Returns:
            Exactly `length` bytes for each range, in the order of `ranges`.

        Raises:
            ObjectMissingError: The object does not exist.
            UnreadableError: The object does not have `size` bytes. The size is checked before
                memory for the ranges is allocated.
            StoreError: The object ends before a range does.
        """

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes; None if it does not exist."""

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """List the objects whose keys start with the prefix, in key order."""

    def delete(self, key: str) -> None:
        """Remove an object. A missing object is not an error."""

    def debris(self, prefix: str) -> Iterator[ObjectInfo]:
        """List the remains of unfinished uploads, which are not objects but take up space.

        `prefix` is empty or ends in '/'. The list includes uploads in progress; only `modified_s`,
        the time of the last write, distinguishes these from abandoned uploads.
        """

    def discard(self, info: ObjectInfo) -> None:
        """Remove an item that `debris` listed.

        It is not an error if the item is gone or its upload has finished.
        """

    def probe(self) -> None:
        """Raise StoreError unless the store can create an object and refuses to create it again.

        Leaves no objects behind, and creates no missing folders.
        """
