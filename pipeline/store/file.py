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
from stat import S_ISDIR
from types import TracebackType
from typing import Self

from pipeline.store.base import (
    NO_SPACE,
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreError,
    UnreadableError,
    check_key,
    file_pieces,
)
from pipeline.store.file_walk import not_regular, walk
from pipeline.store.operations import operation

_TEMPORARY = ".tmp-"
_REFUSED = {*NO_SPACE, errno.EACCES, errno.EPERM, errno.EROFS}
"""Errors that recur until the user removes their cause."""


class FileStore:
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

    def create_from_file(self, key: str, path: Path) -> None:
        """See Store.create_from_file."""
        with (
            file_pieces(path, 1 << 20, f"create {key} in {self.uri}") as (_, pieces),
            self.upload(key) as upload,
        ):
            for piece in pieces:
                upload.write(piece)
            upload.finish()

    def upload(self, key: str) -> "_FileUpload":
        """See Store.upload."""
        return _FileUpload(f"create {key} in {self.uri}", self._path(key))

    def read(self, key: str, limit: int | None = None) -> bytes:
        """See Store.read."""
        with self._opened(key) as (descriptor, size):
            if limit is not None and size > limit:
                raise UnreadableError(
                    f"read {key} in {self.uri}: {size} bytes, expected at most {limit}"
                )
            with os.fdopen(descriptor, "rb", closefd=False) as source:
                return source.read(size)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """See Store.read_range.

        Args:
            key: The object.
            offset: First byte.
            length: Number of bytes.
        """
        return self.read_ranges(key, [(offset, length)])[0]

    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], size: int | None = None
    ) -> list[bytes]:
        """See Store.read_ranges.

        Args:
            key: The object.
            ranges: Offset and length of each range, in bytes.
            size: Expected size of the object in bytes; None allows any size.
        """
        with self._opened(key) as (descriptor, found):
            if size is not None and found != size:
                raise UnreadableError(f"read {key} in {self.uri}: {found} bytes, expected {size}")
            pieces = [
                os.pread(descriptor, min(length, max(0, found - offset)), offset)
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
        try:
            with self._reading(key):
                status = self._path(key).stat()
                self._require_object(key, status.st_mode)
        except ObjectMissingError:
            return None
        return status.st_size

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store.list."""
        return self._files(prefix, temporary=False)

    def _files(self, prefix: str, temporary: bool) -> Iterator[ObjectInfo]:
        # Walk only the deepest folder that contains every key with the prefix.
        start = self._root.joinpath(*prefix.split("/")[:-1])
        found = []
        with operation(f"list {prefix} in {self.uri}"):
            for named in walk(self._root, start, follow=not temporary):
                key = named.path.relative_to(self._root).as_posix()
                if named.path.name.startswith(_TEMPORARY) == temporary and key.startswith(prefix):
                    found.append(ObjectInfo(key, named.size, named.modified_s, "", named.problem))
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """See Store.delete."""
        path, what = self._path(key), f"delete {key} in {self.uri}"
        try:
            with operation(what):
                folder = path.parent.resolve()
                if not folder.is_relative_to(self._root.resolve()):
                    raise StoreError(
                        f"{what}: a link leads out of the store, to {folder}; remove the link or "
                        "its target yourself"
                    )
                path.unlink(missing_ok=True)
        except NotADirectoryError:
            return  # a part of the key is an object, not a folder, so no object has this key
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
            raise StoreError(f"{what}: {error}") from error

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
    def _opened(self, key: str) -> Iterator[tuple[int, int]]:
        """Yield an object's descriptor and size in bytes. Opens only regular files."""
        path = self._path(key)
        with self._reading(key):
            self._require_object(key, path.stat().st_mode)
            # The file may have been replaced in the meantime. Because of O_NONBLOCK, opening a FIFO
            # does not wait for its writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                self._require_object(key, status.st_mode)
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)

    def _require_object(self, key: str, mode: int) -> None:
        if S_ISDIR(mode):  # the key is a prefix of longer keys, not an object
            raise ObjectMissingError(f"read {key} in {self.uri}: no such object")
        if problem := not_regular(mode):
            raise UnreadableError(f"read {key} in {self.uri}: {problem}")

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            with operation(f"read {key} in {self.uri}"):
                yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissingError(f"read {key} in {self.uri}: no such object") from error
        except OSError as error:
            what = f"read {key} in {self.uri}"
            if error.errno == errno.ELOOP:
                raise UnreadableError(
                    f"{what}: a link that leads nowhere: {error.strerror}; remove it"
                ) from error
            raise StoreError(f"{what}: {error}") from error


class _FileUpload:
    """A temporary file next to its target. Once complete, it is linked to the target's name."""

    def __init__(self, what: str, target: Path) -> None:
        self._what = what
        self._target = target
        self._temporary = target.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
        with self._storing():
            target.parent.mkdir(parents=True, exist_ok=True)
            self._out = self._temporary.open("xb")

    def write(self, data: bytes | memoryview) -> int:
        """See Upload.write."""
        with self._storing():
            return self._out.write(data)

    def finish(self) -> None:
        """See Upload.finish."""
        with self._storing():
            self._out.flush()
            os.fsync(self._out.fileno())
            try:
                os.link(self._temporary, self._target)
            except FileExistsError as error:
                raise ObjectExistsError(f"{self._what}: the object already exists") from error
            _sync_folder(self._target.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):  # the error of a full disk may recur here
            self._out.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            with operation(self._what):
                yield
        except OSError as error:  # includes FileExistsError, if a file exists in a folder's place
            full = error.errno in NO_SPACE
            fix = "; committed objects are safe: free some space and start again" if full else ""
            kind = RefusedError if error.errno in _REFUSED else StoreError
            raise kind(f"{self._what}: {error}{fix}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
