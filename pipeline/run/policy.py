"""Policies in the store: HF safetensors with config and tokenizer, one folder per version."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pipeline.run import keys
from pipeline.run.amendments import read_amendments
from pipeline.run.commit import (
    Committed,
    CorruptObjectError,
    DataFile,
    commit,
    fetch_file,
    file_list,
    files_in,
    new_write_id,
    put_file,
    read_commit,
)
from pipeline.store.base import Store


def policy_digest(files: Sequence[DataFile]) -> str:
    """SHA-256 over the name and SHA-256 of each weights file, in order of name."""
    weights = sorted((_name(f), f.sha256) for f in files if f.key.endswith(".safetensors"))
    return hashlib.sha256("".join(f"{name} {sha}\n" for name, sha in weights).encode()).hexdigest()


def publish_policy(store: Store, version: int, folder: Path) -> Committed:
    """Write every file of a folder as a policy version and commit it.

    When another writer was first, `ours` is False and `body["sha256"]` is its policy's digest.
    """
    write_id = new_write_id()
    files = [
        put_file(store, keys.policy_file(version, write_id, path.name), path)
        for path in sorted(folder.iterdir())
        if path.is_file()
    ]
    return _commit(store, version, files, write_id)


def refer_policy(store: Store, version: int, files: Sequence[DataFile]) -> Committed:
    """Commit a policy version whose files are already in the store (the staged model)."""
    return _commit(store, version, files, new_write_id())


def fetch_policy(store: Store, version: int, folder: Path) -> None:
    """Download a policy version into a folder, each file checked against its digest.

    Memory is bounded, however large the files are. Version 0 is the model of the run's description:
    where that was amended, the commit of policy 0 still lists the files of run.json.
    Raises ObjectMissingError, CorruptObjectError (also for a commit of something else), StoreError.
    """
    body = read_commit(store, keys.policy(version))
    if body.get("version") != version or "sha256" not in body:
        raise CorruptObjectError(
            f"{keys.policy(version)} in {store.uri}: found a commit of version "
            f"{body.get('version')!r} with {sorted(body)}, expected that of policy {version}; "
            "restore the object"
        )
    folder.mkdir(parents=True, exist_ok=True)
    files = files_in(body)
    for amendment in read_amendments(store) if version == 0 else ():
        if "model" in amendment.inputs:
            files = list(amendment.changes["inputs.model"].values())
    for file in files:
        fetch_file(store, file, folder / _name(file))


def _commit(store: Store, version: int, files: Sequence[DataFile], write_id: str) -> Committed:
    body = {"version": version, "sha256": policy_digest(files), "files": file_list(files)}
    return commit(store, keys.policy(version), body, write_id)


def _name(file: DataFile) -> str:
    return file.key.rsplit("/", 1)[-1]
