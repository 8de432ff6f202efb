"""The file:// store, which is a folder.

Creating an object is atomic, durable and conditional: the store writes a temporary file, calls
fsync, and links the file to the object's name.
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import BinaryIO

from pipeline.store.base import (
    NO_SPACE,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    Store,
    StoreError,
    UnreadableError,
    Upload,
    check_key,
)

_TEMPORARY = ".tmp-"
_REFUSED = {*NO_SPACE, errno.EACCES, errno.EPERM, errno.EROFS}
"""Errors that recur until the user removes their cause."""
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of reading an object that does not exist; a folder is not an object."""


class FileStore(Store):
    """Stores objects as files in a folder, on any file system with hard links (including NFS)."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.uri = self._root.as_uri()

    def _path(self, key: str) -> Path:
        check_key(key)
        return self._root.joinpath(*key.split("/"))

    def create(self, key: str, data: bytes) -> None:
        """See Store.create."""
        with self.upload(key) as upload:
            upload.write(data)
            upload.finish()

    def upload(self, key: str) -> "_FileUpload":
        """See Store.upload. Raises ObjectExistsError if the object exists."""
        return _FileUpload(f"create {key} in {self.uri}", self._path(key))

    def read(self, key: str, limit: int | None = None) -> bytes:
        """See Store.read."""
        with self._opened(key) as (source, size):
            if limit is not None and size > limit:
                raise UnreadableError(
                    f"read {key} in {self.uri}: {size} bytes, expected at most {limit}"
                )
            return source.read(size)

    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], size: int | None = None
    ) -> list[bytes]:
        """See Store.read_ranges.

        Args:
            key: The object.
            ranges: Offset and length of each range, in bytes.
            size: Expected size of the object in bytes; None allows any size.
        """
        with self._opened(key) as (source, found):
            if size is not None and found != size:
                raise UnreadableError(f"read {key} in {self.uri}: {found} bytes, expected {size}")
            pieces = [
                os.pread(source.fileno(), min(length, max(0, found - offset)), offset)
                for offset, length in ranges
            ]
        for piece, (offset, length) in zip(pieces, ranges, strict=True):
            if len(piece) != length:
                raise StoreError(
                    f"read {key} in {self.uri}: {len(piece)} bytes at {offset}, expected {length}"
                )
        return pieces

    def size(self, key: str) -> int | None:
        """See Store.size."""
        with _store_errors(f"read {key} in {self.uri}"):
            try:
                status = self._path(key).stat()
            except _MISSING:
                return None
        return None if S_ISDIR(status.st_mode) else status.st_size

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store.list."""
        return self._files(prefix, temporary=False)

    def _files(self, prefix: str, temporary: bool) -> Iterator[ObjectInfo]:
        # Walk only the deepest folder that contains every key with the prefix.
        start = self._root.joinpath(*prefix.split("/")[:-1])
        found = []
        with _store_errors(f"list {prefix} in {self.uri}"):
            for folder, _, names in os.walk(start, onerror=_raise, followlinks=True):
                for path in (Path(folder, name) for name in names):
                    key = path.relative_to(self._root).as_posix()
                    if path.name.startswith(_TEMPORARY) != temporary or not key.startswith(prefix):
                        continue
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        status = path.stat()
                        if S_ISREG(status.st_mode):
                            found.append(ObjectInfo(key, status.st_size, status.st_mtime))
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """See Store.delete."""
        path, what = self._path(key), f"delete {key} in {self.uri}"
        folder = os.path.realpath(path.parent)
        if not Path(folder).is_relative_to(os.path.realpath(self._root)):
            raise StoreError(
                f"{what}: a link leads out of the store, to {folder}; remove the link or its "
                "target yourself"
            )
        with _store_errors(what), contextlib.suppress(NotADirectoryError):
            path.unlink(missing_ok=True)

    def debris(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store.debris. The debris consists of temporary files, in key order."""
        return self._files(prefix, temporary=True)

    def discard(self, info: ObjectInfo) -> None:
        """See Store.discard."""
        if not info.key.rsplit("/", 1)[-1].startswith(_TEMPORARY):
            raise StoreError(f"discard {info.key} in {self.uri}: this is an object, not debris")
        self.delete(info.key)

    def probe(self) -> None:
        """See Store.probe. Writes the test object to the nearest existing folder."""
        folder = self._root
        while not os.path.lexists(folder):
            folder = folder.parent
        if not folder.is_dir():
            raise StoreError(f"{folder} is a file, expected a folder; choose another place")
        store = FileStore(folder)
        name = f"probe.{secrets.token_hex(4)}"
        store.create(name, b"")
        store.delete(name)

    @contextlib.contextmanager
    def _opened(self, key: str) -> Iterator[tuple[BinaryIO, int]]:
        """Yield an object's open file and its size in bytes."""
        path, what = self._path(key), f"read {key} in {self.uri}"
        with _store_errors(what):
            try:
                source = path.open("rb")
            except _MISSING as error:
                raise ObjectMissingError(f"{what}: no such object") from error
            with source:
                yield source, os.fstat(source.fileno()).st_size


class _FileUpload(Upload):
    """A temporary file next to its target. Once complete, it is linked to the target's name."""

    def __init__(self, what: str, target: Path) -> None:
        self._what = what
        self._target = target
        self._temporary = target.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
        with _store_errors(what):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._out = self._temporary.open("xb")

    def write(self, data: bytes | memoryview) -> int:
        """See Upload.write."""
        with _store_errors(self._what):
            return self._out.write(data)

    def finish(self) -> None:
        """See Upload.finish."""
        with _store_errors(self._what):
            self._out.flush()
            os.fsync(self._out.fileno())
            try:
                os.link(self._temporary, self._target)
            except FileExistsError as error:
                raise ObjectExistsError(f"{self._what}: the object already exists") from error
            _sync_folder(self._target.parent)

    def leave(self) -> None:
        """See Upload.leave."""
        with contextlib.suppress(OSError):  # the error of a full disk may recur here
            self._out.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _store_errors(what: str) -> Iterator[None]:
    """Raise the operating system's errors as store errors whose messages begin with `what`."""
    try:
        yield
    except OSError as error:
        full = error.errno in NO_SPACE
        fix = "; committed objects are safe: free some space and start again" if full else ""
        kind = RefusedError if error.errno in _REFUSED else StoreError
        raise kind(f"{what}: {error}{fix}") from error


def _raise(error: OSError) -> None:
    """Raise the error of listing a folder, unless the folder is gone."""
    if not isinstance(error, _MISSING):
        raise error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
