"""file:// store: a folder. Creation is write, fsync, link: atomic, durable and conditional."""

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

_TEMPORARY = ".tmp-"
_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {*_FULL, errno.EACCES, errno.EPERM, errno.EROFS}
"""What another try would meet again, until somebody mends it."""


class FileStore:
    """Objects as files under one folder. Works on any file system with hard links (also NFS)."""

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
        """See Store.read_range."""
        return self.read_ranges(key, [(offset, length)])[0]

    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], size: int | None = None
    ) -> list[bytes]:
        """See Store.read_ranges."""
        with self._opened(key) as (descriptor, found):
            if size is not None and found != size:
                raise UnreadableError(
                    f"read {key} in {self.uri}: {found} bytes, expected {size} of them"
                )
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
        # Walk only the deepest folder that holds every key of the prefix.
        start = self._root.joinpath(*prefix.split("/")[:-1])
        found = []
        for named in walk(self._root, start, follow=not temporary):
            key = named.path.relative_to(self._root).as_posix()
            if named.path.name.startswith(_TEMPORARY) == temporary and key.startswith(prefix):
                found.append(ObjectInfo(key, named.size, named.modified_s, "", named.problem))
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """See Store.delete."""
        path = self._path(key)
        try:
            folder = path.parent.resolve()
            if not folder.is_relative_to(self._root.resolve()):
                raise StoreError(
                    f"delete {key} in {self.uri}: a link leads out of the store, to {folder}; "
                    "remove the link, or what is there, yourself"
                )
            path.unlink(missing_ok=True)
        except NotADirectoryError:
            return  # an object where a folder would be: nothing has this key
        except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
            raise StoreError(f"delete {key} in {self.uri}: {error}") from error

    def debris(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store.debris: temporary files, in key order."""
        return self._files(prefix, temporary=True)

    def discard(self, info: ObjectInfo) -> None:
        """See Store.discard."""
        if not info.key.rsplit("/", 1)[-1].startswith(_TEMPORARY):
            raise StoreError(f"discard {info.key} in {self.uri}: it is an object, not debris")
        self.delete(info.key)

    def probe(self) -> None:
        """See Store.probe. The test object is written to the nearest existing folder."""
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
        """An object's descriptor and size in bytes. Nothing but a regular file is opened."""
        path = self._path(key)
        with self._reading(key):
            self._require_object(key, path.stat().st_mode)
            # Should it have been replaced since: opening a FIFO does not wait for its writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                self._require_object(key, status.st_mode)
                yield descriptor, status.st_size
            finally:
                os.close(descriptor)

    def _require_object(self, key: str, mode: int) -> None:
        if S_ISDIR(mode):  # the beginning of longer keys, not an object
            raise ObjectMissingError(f"read {key} in {self.uri}: no such object")
        if problem := not_regular(mode):
            raise UnreadableError(f"read {key} in {self.uri}: {problem}")

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissingError(f"read {key} in {self.uri}: no such object") from error
        except OSError as error:
            raise StoreError(f"read {key} in {self.uri}: {error}") from error


class _FileUpload:
    """A temporary file beside its target, linked to the target's name when it is complete."""

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
                raise ObjectExistsError(f"{self._what}: it exists already") from error
            _sync_folder(self._target.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(OSError):  # the full disk's error, again
            self._out.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # also FileExistsError: a file where a folder is needed
            full = error.errno in _FULL
            fix = "; what was committed is safe: free some space and start again" if full else ""
            kind = RefusedError if error.errno in _REFUSED else StoreError
            raise kind(f"{self._what}: {error}{fix}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
