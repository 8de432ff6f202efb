"""Commit objects: small JSON objects with computable names, created once.

A commit lists its data files by key, size and SHA-256. Data files carry a random write id in their
names, so two writers of one thing never overwrite each other: the first commit wins, and the files
of the other one are debris, which `retrace traces sweep` removes. A commit carries the SHA-256 of
its own content, so that later changes to it are detected.
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
from pipeline.run import parse
from pipeline.run.strict_json import canonical, parse_numbers
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
"""Bytes of the largest commit: a million ranges of trace files."""

_WRITE_ID = "attempt"
"""The key of a write id in a commit; the stored name is older than the term."""
_RESTORE = "restore the object or remake the step"


class CorruptObjectError(StoreError, LastingError):
    """An object's content differs from its commit, or is not valid."""


@dataclass(frozen=True)
class DataFile:
    """A data file of a commit. Keys are relative to the root of the run."""

    key: str
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Committed:
    """The commit object that the store holds."""

    ours: bool
    """False: another writer was first, and `body` is that writer's."""
    body: dict[str, Any]


def write_id_of(body: Mapping[str, Any]) -> str:
    """The write id of a commit; empty: it has none."""
    return str(body.get(_WRITE_ID, ""))


def new_write_id() -> str:
    """A new write id, the random part of data file names: 8 hex digits."""
    return secrets.token_hex(4)


def sha256(data: bytes | memoryview) -> str:
    """Hex SHA-256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a local file."""
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def put_file(store: Store, key: str, path: Path) -> DataFile:
    """Write a data file from a local file and return its entry for the commit."""
    digest = sha256_of_file(path)
    store.create_from_file(key, path)
    return DataFile(key, path.stat().st_size, digest)


def read_data(store: Store, file: DataFile) -> bytes:
    """Read and check a whole data file. Raises CorruptObjectError, ObjectMissingError."""
    try:
        data = store.read(file.key, file.size)
    except UnreadableError as error:
        raise CorruptObjectError(
            f"{error}: its commit says {file.size} bytes; {_RESTORE}"
        ) from error
    if len(data) != file.size or sha256(data) != file.sha256:
        raise CorruptObjectError(
            f"{file.key} in {store.uri}: {len(data)} bytes with SHA-256 {sha256(data)[:16]}..., "
            f"its commit says {file.size} bytes with {file.sha256[:16]}...; {_RESTORE}"
        )
    return data


def fetch_file(store: Store, file: DataFile, target: Path, fix: str = _RESTORE) -> None:
    """Download and check a data file in bounded memory; after an error there is no `target`.

    `fix` ends the text of errors. Raises CorruptObjectError, ObjectMissingError, StoreError.
    """
    name = f"{file.key} in {store.uri}"
    size = store.size(file.key)
    if size is None:
        raise ObjectMissingError(f"read {name}: no such object; {fix}")
    if size != file.size:
        raise CorruptObjectError(f"{name}: {size} bytes, its commit says {file.size}; {fix}")
    with downloaded(store, file.key, file.size, target) as found:
        if found != file.sha256:
            raise CorruptObjectError(
                f"{name}: SHA-256 {found[:16]}..., its commit says {file.sha256[:16]}...; {fix}"
            )


def commit(store: Store, key: str, body: dict[str, Any], write_id: str) -> Committed:
    """Create a commit object, or read the one that already exists.

    `write_id` (as "attempt") and the digest of the content are added to the body: when the answer
    to a successful create was lost, the retry recognises its own commit by the write id.
    """
    body = {**body, _WRITE_ID: write_id}
    body[CONTENT_SHA256] = content_digest(body)
    data = to_json(body)
    if len(data) > MOST_BYTES:
        raise UnreadableError(
            f"create {key} in {store.uri}: {len(data)} bytes of JSON, readers take at most "
            f"{MOST_BYTES}; make more and smaller shards"
        )
    try:
        store.create(key, data)
    except ObjectExistsError:
        found = read_commit(store, key)
        return Committed(found.get(_WRITE_ID) == write_id, found)
    return Committed(True, body)


def read_commit(store: Store, key: str) -> dict[str, Any]:
    """Read a commit's body and compare it with its own digest, if it has one.

    `verify` requires a digest. Raises ObjectMissingError, CorruptObjectError.
    """
    try:
        data = store.read(key, MOST_BYTES)
    except UnreadableError as error:
        raise CorruptObjectError(f"{error}; restore the object") from error
    try:
        body, as_stored = parse_numbers(data)
    except ValueError as error:
        raise CorruptObjectError(f"{key} in {store.uri}: not JSON: {error}") from error
    if not isinstance(body, dict):
        raise CorruptObjectError(f"{key} in {store.uri}: a {type(body).__name__}, not an object")
    found = content_digest(as_stored)
    if body.get(CONTENT_SHA256, found) != found:
        raise CorruptObjectError(
            f"{key} in {store.uri}: its content has SHA-256 {str(found)[:16]}..., it says "
            f"{str(body[CONTENT_SHA256])[:16]}...; restore the object or remake what it commits"
        )
    return body


def find_commit(store: Store, key: str) -> dict[str, Any] | None:
    """Read a commit object's body; None if it does not exist yet."""
    try:
        return read_commit(store, key)
    except ObjectMissingError:
        return None


@contextmanager
def parsing(store: Store, key: str) -> Iterator[None]:
    """Raise CorruptObjectError, naming the object, for what the block finds wrong in its JSON."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise CorruptObjectError(f"{key} in {store.uri}: {error}; restore the object") from error


def to_json(body: dict[str, Any]) -> bytes:
    """The JSON form of all commit objects: sorted keys, one to a line, NaN refused.

    An item of a list has a line of its own, and what is in it has none: Python's encoder that
    indents everything takes 5 times as long.
    """
    lines = (f" {_line(key)}: {_lines(body[key])}" for key in sorted(body))
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def content_digest(body: dict[str, Any]) -> str:
    """Hex SHA-256 of the canonical form of a commit without its own digest.

    Numbers that were read must be as they stood (`parse_numbers`).
    """
    rest = {key: value for key, value in body.items() if key != CONTENT_SHA256}
    return sha256(canonical(rest).encode())


def file_list(files: Iterable[DataFile]) -> list[dict[str, Any]]:
    """The entries of data files in a commit."""
    return [asdict(file) for file in files]


def files_in(body: dict[str, Any]) -> list[DataFile]:
    """The data files that a commit lists. Raises CorruptObjectError when its list is none."""
    try:
        return [
            DataFile(parse.key(f["key"]), parse.number(f["size"]), parse.text(f["sha256"]))
            for f in parse.items(body["files"])
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptObjectError(f"its list of files is not one: {error!r}") from error


def _lines(value: Any) -> str:
    if not isinstance(value, list | tuple) or not value:
        return _line(value)
    return "[\n  " + ",\n  ".join(map(_line, value)) + "\n ]"


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
