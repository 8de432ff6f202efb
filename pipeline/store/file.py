"""file:// store: a folder. Creation is write, fsync, link: atomic, durable and conditional."""

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from stat import S_ISDIR
from typing import BinaryIO

from pipeline.store.base import ObjectExistsError, ObjectInfo, ObjectMissingError, StoreError

_TEMPORARY = ".tmp-"


class FileStore:
    """Objects as files under one folder. Works on any file system with hard links (also NFS)."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self.uri = self._root.as_uri()

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") for part in parts):
            raise StoreError(f"object key {key!r}: empty or relative parts are not allowed")
        return self._root.joinpath(*parts)

    def create(self, key: str, data: bytes) -> None:
        """See Store.create."""
        self._create(key, lambda out: out.write(data))

    def create_from_file(self, key: str, path: Path) -> None:
        """See Store.create_from_file."""
        try:
            source = path.open("rb")
        except OSError as error:
            raise StoreError(f"create {key} in {self.uri}: {error}") from error
        with source:
            self._create(key, lambda out: shutil.copyfileobj(source, out, 1 << 20))

    def _create(self, key: str, fill: Callable[[BinaryIO], object]) -> None:
        target = self._path(key)
        temporary = target.parent / f"{_TEMPORARY}{secrets.token_hex(8)}"
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:  # also FileExistsError: a file where a folder is needed
            raise StoreError(f"create {key} in {self.uri}: {error}") from error
        try:
            with temporary.open("xb") as out:
                fill(out)
                out.flush()
                os.fsync(out.fileno())
            os.link(temporary, target)
            _sync_folder(target.parent)
        except FileExistsError as error:
            raise ObjectExistsError(f"create {key} in {self.uri}: it exists already") from error
        except OSError as error:
            raise StoreError(f"create {key} in {self.uri}: {error}") from error
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def read(self, key: str) -> bytes:
        """See Store.read."""
        with self._reading(key):
            return self._path(key).read_bytes()

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """See Store.read_range."""
        with self._reading(key), self._path(key).open("rb") as source:
            source.seek(offset)
            data = source.read(length)
        if len(data) != length:
            raise StoreError(
                f"read {key} in {self.uri}: {len(data)} bytes at {offset}, expected {length}"
            )
        return data

    def size(self, key: str) -> int | None:
        """See Store.size."""
        try:
            with self._reading(key):
                status = self._path(key).stat()
        except ObjectMissingError:
            return None
        # A folder is where keys go on, not an object.
        return None if S_ISDIR(status.st_mode) else status.st_size

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store.list."""
        # Walk only the deepest folder that holds every key of the prefix.
        start = self._root.joinpath(*prefix.split("/")[:-1])
        found = []
        for folder, _, names in os.walk(start):
            for name in names:
                path = Path(folder, name)
                key = path.relative_to(self._root).as_posix()
                if name.startswith(_TEMPORARY) or not key.startswith(prefix):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    found.append(ObjectInfo(key, status.st_size, status.st_mtime))
        yield from sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        """See Store.delete."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"delete {key} in {self.uri}: {error}") from error

    @contextlib.contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise ObjectMissingError(f"read {key} in {self.uri}: no such object") from error
        except OSError as error:
            raise StoreError(f"read {key} in {self.uri}: {error}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
