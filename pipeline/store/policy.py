"""Policies in the store: HF safetensors with config and tokenizer, one folder per version."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pipeline.store import keys
from pipeline.store.base import Store
from pipeline.store.commit import (
    Committed,
    DataFile,
    commit,
    file_list,
    files_in,
    new_attempt,
    put_file,
    read_commit,
    read_data,
)


def policy_digest(files: Sequence[DataFile]) -> str:
    """SHA-256 over the name and SHA-256 of each weights file, in order of name."""
    weights = sorted((_name(f), f.sha256) for f in files if f.key.endswith(".safetensors"))
    return hashlib.sha256("".join(f"{name} {sha}\n" for name, sha in weights).encode()).hexdigest()


def publish_policy(store: Store, version: int, folder: Path) -> Committed:
    """Write every file of a folder as a policy version and commit it.

    When another maker was first, `ours` is False and `body["sha256"]` is the digest of theirs.
    """
    attempt = new_attempt()
    files = [
        put_file(store, keys.policy_file(version, attempt, path.name), path)
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]
    return _commit(store, version, files, attempt)


def refer_policy(store: Store, version: int, files: Sequence[DataFile]) -> Committed:
    """Commit a policy version whose files are in the store already (the staged model)."""
    return _commit(store, version, files, new_attempt())


def fetch_policy(store: Store, version: int, folder: Path) -> None:
    """Download a policy version into a folder, each file checked against its digest.

    Raises ObjectMissingError, CorruptObjectError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in files_in(read_commit(store, keys.policy(version))):
        (folder / _name(file)).write_bytes(read_data(store, file))


def _commit(store: Store, version: int, files: Sequence[DataFile], attempt: str) -> Committed:
    body = {"version": version, "sha256": policy_digest(files), "files": file_list(files)}
    return commit(store, keys.policy(version), body, attempt)


def _name(file: DataFile) -> str:
    return file.key.rsplit("/", 1)[-1]
