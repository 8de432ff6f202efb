"""A store in memory, with which a test can try thousands of damaged stores without a disk."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pipeline.store import (
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    StoreError,
    UnreadableError,
)
from pipeline.store.base import check_key


class MemoryStore:
    """A Store (see pipeline.store.base) in a dict. Its objects have no modification time."""

    uri = "memory://test"

    def __init__(self, objects: Mapping[str, bytes] | None = None) -> None:
        self.objects = dict(objects or {})

    def create(self, key: str, data: bytes) -> None:
        check_key(key)
        if key in self.objects:
            raise ObjectExistsError(f"create {key} in {self.uri}: the object already exists")
        self.objects[key] = bytes(data)

    def upload_file(self, key: str, path: Path) -> None:
        self.create(key, path.read_bytes())

    def upload(self, key: str) -> "_Upload":
        return _Upload(self, key)

    def read(self, key: str, limit: int | None = None) -> bytes:
        check_key(key)
        if key not in self.objects:
            raise ObjectMissingError(f"read {key} in {self.uri}: no such object")
        data = self.objects[key]
        if limit is not None and len(data) > limit:
            what = f"read {key} in {self.uri}"
            raise UnreadableError(f"{what}: {len(data)} bytes, expected at most {limit}")
        return data

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        data = self.read(key)
        if offset < 0 or length < 0 or offset + length > len(data):
            raise StoreError(f"read {key} in {self.uri}: no {length} bytes at {offset}")
        return data[offset : offset + length]

    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], size: int | None = None
    ) -> list[bytes]:
        found = len(self.read(key))
        if size is not None and found != size:
            what = f"read {key} in {self.uri}"
            raise UnreadableError(f"{what}: {found} bytes, expected {size}")
        return list(itertools.starmap(lambda o, n: self.read_range(key, o, n), ranges))

    def size(self, key: str) -> int | None:
        check_key(key)
        return len(self.objects[key]) if key in self.objects else None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for key in sorted(self.objects):
            if key.startswith(prefix):
                yield ObjectInfo(key, len(self.objects[key]), 0.0)

    def delete(self, key: str) -> None:
        self.objects.pop(key, None)

    def debris(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(())

    def discard(self, info: ObjectInfo) -> None:
        raise StoreError(f"discard {info.key}: no debris is left here")

    def probe(self) -> None:
        """Do nothing, because memory can always be written."""


class _Upload:
    def __init__(self, store: MemoryStore, key: str) -> None:
        self._store, self._key, self._data = store, key, bytearray()

    def write(self, data: bytes | memoryview) -> int:
        self._data += data
        return len(data)

    def finish(self) -> None:
        self._store.create(self._key, bytes(self._data))

    def __enter__(self) -> "_Upload":
        return self

    def __exit__(self, *error: object) -> None:
        pass
