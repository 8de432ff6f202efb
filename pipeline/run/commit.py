"""Commit objects: small JSON objects with predictable names, created once.

A commit lists each of its data files with key, size and SHA-256. The names of data files contain a
random write id, so two writers never overwrite each other's files. If two writers try to create the
same commit, the first one succeeds. The other writer's files are then debris, which `retrace traces
sweep` removes. A commit contains the SHA-256 of its content, so that readers detect later changes.
"""

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import LastingError
from pipeline.run.parse import Count, typed
from pipeline.store.base import (
    ObjectExistsError,
    ObjectMissingError,
    Store,
    StoreError,
    UnreadableError,
)
from pipeline.store.download import downloaded

CONTENT_SHA256 = "content_sha256"
"""The key of a commit's own digest; see `content_digest`."""


MOST_BYTES = 128 << 20
"""Maximum size of a commit in bytes, enough for a million ranges of trace files."""

_WRITE_ID = "attempt"
"""The key of the write id in a commit. This stored name is older than the term *write id*."""
_RESTORE = "restore the object or remake the step"


class CorruptObjectError(StoreError, LastingError):
    """An object's content differs from its commit, or is not valid."""


@dataclass(frozen=True)
class DataFile:
    """A data file that a commit lists. Its key is relative to the root of the run."""

    key: str
    size: Count
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Committed:
    """A commit object in the store."""

    ours: bool
    """False if another writer committed first; `body` is then that writer's commit."""
    body: dict[str, Any]


def write_id_of(body: Mapping[str, Any]) -> str:
    """Return the write id of a commit; an empty string if it has none."""
    return str(body.get(_WRITE_ID, ""))


def new_write_id() -> str:
    """Return a new write id, the random part of data file names: 8 hex digits."""
    return secrets.token_hex(4)


def sha256(data: bytes | memoryview) -> str:
    """Return the hex SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the hex SHA-256 of a local file."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def put_file(store: Store, key: str, path: Path) -> DataFile:
    """Create a data file in the store from a local file.

    Args:
        store: The run.
        key: The key to create.
        path: The local file.

    Returns:
        The data file's entry for the commit.
    """
    digest = sha256_of_file(path)
    store.upload_file(key, path)
    return DataFile(key, path.stat().st_size, digest)


def put_bytes(store: Store, key: str, data: bytes) -> None:
    """Create a data file in the store from bytes in memory.

    Args:
        store: The run.
        key: The key to create. It must be unique to this content; see Store.upload.
        data: The content.
    """
    with store.upload(key) as upload:
        upload.write(data)
        upload.finish()


def read_data(store: Store, file: DataFile) -> bytes:
    """Read and check an entire data file. Raises CorruptObjectError or ObjectMissingError."""
    try:
        data = store.read(file.key, file.size)
    except UnreadableError as error:
        raise CorruptObjectError(
            f"{error}: its commit records {file.size} bytes; {_RESTORE}"
        ) from error
    if len(data) != file.size or sha256(data) != file.sha256:
        raise CorruptObjectError(
            f"{file.key} in {store.uri}: {len(data)} bytes with SHA-256 {sha256(data)[:16]}..., "
            f"but its commit records {file.size} bytes with {file.sha256[:16]}...; {_RESTORE}"
        )
    return data


def fetch_file(store: Store, file: DataFile, target: Path, fix: str = _RESTORE) -> None:
    """Download and check a data file in bounded memory. After an error, `target` does not exist.

    Args:
        store: The run.
        file: The data file's entry in its commit.
        target: The local file to create.
        fix: What the user should do after an error; error messages end with this text.

    Raises:
        CorruptObjectError: The object differs from its entry.
        ObjectMissingError: The object does not exist.
        StoreError: The download failed.
    """
    name = f"{file.key} in {store.uri}"
    size = store.size(file.key)
    if size is None:
        raise ObjectMissingError(f"read {name}: no such object; {fix}")
    if size != file.size:
        raise CorruptObjectError(f"{name}: {size} bytes, but its commit records {file.size}; {fix}")
    with downloaded(store, file.key, file.size, target) as found:
        if found != file.sha256:
            raise CorruptObjectError(
                f"{name}: SHA-256 {found[:16]}..., but its commit records "
                f"{file.sha256[:16]}...; {fix}"
            )


def commit(store: Store, key: str, body: dict[str, Any], write_id: str) -> Committed:
    """Create a commit object, or read the one that already exists.

    Args:
        store: The run.
        key: The commit's key.
        body: The content; this function adds the write id (as "attempt") and the content's digest.
        write_id: The writer's id. If the response to a successful create is lost, the retry
            recognises its own commit by this id.

    Returns:
        The stored commit, and whether this call wrote it.

    Raises:
        UnreadableError: The commit is larger than readers accept.
        CorruptObjectError: The existing commit is damaged.
        StoreError: The store failed.
    """
    body = {**body, _WRITE_ID: write_id}
    body[CONTENT_SHA256] = content_digest(body)
    data = to_json(body)
    if len(data) > MOST_BYTES:
        raise UnreadableError(
            f"create {key} in {store.uri}: {len(data)} bytes of JSON, but readers accept at most "
            f"{MOST_BYTES}; configure more and smaller shards"
        )
    try:
        store.create(key, data)
    except ObjectExistsError:
        found = read_commit(store, key)
        return Committed(found.get(_WRITE_ID) == write_id, found)
    return Committed(True, body)


def read_commit(store: Store, key: str) -> dict[str, Any]:
    """Read a commit's body and check it against the commit's own digest.

    Raises ObjectMissingError or CorruptObjectError.
    """
    return read_commit_file(store, key)[1]


def read_commit_file(store: Store, key: str) -> tuple[DataFile, dict[str, Any]]:
    """Read a commit as `read_commit` does; return its entry as a data file, and its body.

    Another commit can use this entry to list this commit among its files.
    """
    try:
        data = store.read(key, MOST_BYTES)
    except UnreadableError as error:
        raise CorruptObjectError(f"{error}; restore the object") from error
    try:
        body = json.loads(data)
        found = content_digest(body)
    except (AttributeError, ValueError, RecursionError) as error:
        raise CorruptObjectError(
            f"{key} in {store.uri}: not a JSON object: {error}; restore the object"
        ) from error
    if body.get(CONTENT_SHA256) != found:
        raise CorruptObjectError(
            f"{key} in {store.uri}: its content has SHA-256 {found[:16]}..., expected its own "
            f"digest {str(body.get(CONTENT_SHA256))[:16]}...; restore the object"
        )
    return DataFile(key, len(data), sha256(data)), body


def find_commit(store: Store, key: str) -> dict[str, Any] | None:
    """Read a commit's body; return None if the commit does not exist yet."""
    try:
        return read_commit(store, key)
    except ObjectMissingError:
        return None


def find_commit_of(store: Store, key: str, place: Mapping[str, int]) -> dict[str, Any] | None:
    """Read a commit's body, and check that it is the commit that belongs to its key.

    Args:
        store: The run.
        key: The commit's key.
        place: Fields of the body that repeat numbers in the key, with these numbers.

    Returns:
        The body; None if the commit does not exist yet.

    Raises:
        CorruptObjectError: The commit is damaged, or was written under a different key.
    """
    body = find_commit(store, key)
    if body is not None and (text := other_place(body, place)) is not None:
        raise CorruptObjectError(f"{key} in {store.uri}: {text}; restore the object")
    return body


def other_place(body: Mapping[str, Any], place: Mapping[str, object]) -> str | None:
    """Return how a commit's body differs from the place in its key; None if it does not."""
    found = {name: body.get(name) for name in place}
    if found == dict(place):
        return None
    return f"this is the commit of {found}, expected {dict(place)}"


@contextmanager
def parsing(store: Store, key: str) -> Iterator[None]:
    """Turn a TypeError or ValueError in the block into a CorruptObjectError that names the key."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise CorruptObjectError(f"{key} in {store.uri}: {error}; restore the object") from error


def to_json(body: dict[str, Any]) -> bytes:
    """Return the JSON form in which commits are stored: sorted keys, one per line.

    Each item of a list is also written on its own line. Indenting everything would take Python's
    encoder 5 times as long. Raises ValueError for NaN.
    """
    lines = (f" {_line(key)}: {_lines(body[key])}" for key in sorted(body))
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def content_digest(body: dict[str, Any]) -> str:
    """Return the hex SHA-256 of a commit's canonical form, without the digest itself."""
    return sha256(canonical({k: v for k, v in body.items() if k != CONTENT_SHA256}).encode())


def canonical(value: Any) -> str:
    """Return a JSON value as it is digested. Raises ValueError for NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def file_list(files: Iterable[DataFile]) -> list[dict[str, Any]]:
    """Return the entries of data files for a commit."""
    return [asdict(file) for file in files]


def files_in(body: Mapping[str, Any], name: str = "files") -> list[DataFile]:
    """Return the data files that a field of a commit lists.

    Raises CorruptObjectError for an invalid list.
    """
    try:
        return list(typed(body, name, tuple[DataFile, ...]))
    except ValueError as error:
        raise CorruptObjectError(str(error)) from error


def _lines(value: Any) -> str:
    if not isinstance(value, list | tuple) or not value:
        return _line(value)
    return "[\n  " + ",\n  ".join(map(_line, value)) + "\n ]"


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
