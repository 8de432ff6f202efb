"""Commit objects: small JSON objects with computable names, created once.

A commit lists its data files by key, size and SHA-256. Data files carry a random attempt in their
names, so two makers of one thing never overwrite each other: the first commit wins, the other's
files are debris that a sweep may remove. A commit carries the SHA-256 of its own content, so that
none is believed that was changed after it was written.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.store.base import ObjectExistsError, ObjectMissingError, Store, StoreError

CONTENT_SHA256 = "content_sha256"
"""The key of a commit's own digest; see `content_digest`."""


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

    `attempt` goes into the body, and the digest of its content: when the answer to a successful
    create was lost, the retry recognises its own commit by the attempt.
    """
    body = {**body, "attempt": attempt}
    body[CONTENT_SHA256] = content_digest(body)
    try:
        store.create(key, to_json(body))
    except ObjectExistsError:
        found = read_commit(store, key)
        return Committed(found.get("attempt") == attempt, found)
    return Committed(True, body)


def read_commit(store: Store, key: str) -> dict[str, Any]:
    """A commit object's body, compared with its own digest if it has one (`verify` insists on it).

    Raises ObjectMissingError, CorruptObjectError.
    """
    data = store.read(key)
    try:
        body = json.loads(data)
        found = content_digest(body) if isinstance(body, dict) else None
    except (ValueError, RecursionError) as error:  # the latter: nested without end
        raise CorruptObjectError(f"{key} in {store.uri}: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise CorruptObjectError(f"{key} in {store.uri}: a {type(body).__name__}, not an object")
    if body.get(CONTENT_SHA256, found) != found:
        raise CorruptObjectError(
            f"{key} in {store.uri}: its content has SHA-256 {str(found)[:16]}..., it says "
            f"{str(body[CONTENT_SHA256])[:16]}...; restore the object or remake what it commits"
        )
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


def content_digest(body: dict[str, Any]) -> str:
    """Hex SHA-256 of a commit without its own digest: JSON, sorted keys, no blanks, ASCII."""
    rest = {key: value for key, value in body.items() if key != CONTENT_SHA256}
    return sha256(json.dumps(rest, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def file_list(files: Iterable[DataFile]) -> list[dict[str, Any]]:
    """Data files as a commit lists them."""
    return [asdict(file) for file in files]


def files_in(body: dict[str, Any]) -> list[DataFile]:
    """The data files that a commit lists."""
    return [DataFile(f["key"], f["size"], f["sha256"]) for f in body["files"]]
