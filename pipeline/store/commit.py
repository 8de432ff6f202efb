"""Commit objects: small JSON objects with computable names, created once.

A commit lists its data files by key, size and SHA-256. Data files carry a random attempt in their
names, so two makers of one thing never overwrite each other: the first commit wins, the other's
files are debris that a sweep may remove.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.store.base import ObjectExistsError, ObjectMissingError, Store, StoreError


class CorruptObjectError(StoreError):
    """An object's bytes are not what its commit promised."""


@dataclass(frozen=True)
class DataFile:
    """A data file named by a commit. Keys are relative to the root of the run."""

    key: str
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Committed:
    """The commit object as it stands in the store."""

    ours: bool
    """False: another maker was first, and `body` is theirs."""
    body: dict[str, Any]


def new_attempt() -> str:
    """A random name for one try at making an object: 8 hex digits."""
    return secrets.token_hex(4)


def sha256(data: bytes | memoryview) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a local file."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def put_data(store: Store, key: str, data: bytes) -> DataFile:
    """Write a data file and say what a commit must say of it."""
    store.create(key, data)
    return DataFile(key, len(data), sha256(data))


def put_file(store: Store, key: str, path: Path) -> DataFile:
    """Write a data file from a local file and say what a commit must say of it."""
    digest = sha256_of_file(path)
    store.create_from_file(key, path)
    return DataFile(key, path.stat().st_size, digest)


def read_data(store: Store, file: DataFile) -> bytes:
    """The whole data file, checked. Raises CorruptObjectError, ObjectMissingError."""
    data = store.read(file.key)
    if len(data) != file.size or sha256(data) != file.sha256:
        raise CorruptObjectError(
            f"{file.key} in {store.uri}: {len(data)} bytes with SHA-256 {sha256(data)[:16]}..., "
            f"its commit says {file.size} bytes with {file.sha256[:16]}...; "
            "restore the object or remake the step"
        )
    return data


def commit(store: Store, key: str, body: dict[str, Any], attempt: str) -> Committed:
    """Create a commit object, or find that it was there.

    `attempt` goes into the body: when the answer to a successful create was lost, the retry
    recognises its own commit by it.
    """
    body = {**body, "attempt": attempt}
    try:
        store.create(key, to_json(body))
    except ObjectExistsError:
        found = read_commit(store, key)
        return Committed(found.get("attempt") == attempt, found)
    return Committed(True, body)


def read_commit(store: Store, key: str) -> dict[str, Any]:
    """A commit object's body. Raises ObjectMissingError, CorruptObjectError."""
    data = store.read(key)
    try:
        body = json.loads(data)
    except ValueError as error:
        raise CorruptObjectError(f"{key} in {store.uri}: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise CorruptObjectError(f"{key} in {store.uri}: a {type(body).__name__}, not an object")
    return body


def find_commit(store: Store, key: str) -> dict[str, Any] | None:
    """A commit object's body, None if it is not there yet."""
    try:
        return read_commit(store, key)
    except ObjectMissingError:
        return None


def to_json(body: dict[str, Any]) -> bytes:
    """JSON as all commit objects are written: sorted keys, indented, NaN refused."""
    return (json.dumps(body, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def file_list(files: Iterable[DataFile]) -> list[dict[str, Any]]:
    """Data files as a commit lists them."""
    return [asdict(file) for file in files]


def files_in(body: dict[str, Any]) -> list[DataFile]:
    """The data files that a commit lists."""
    return [DataFile(f["key"], f["size"], f["sha256"]) for f in body["files"]]
