"""Policies in the store: HF safetensors with config and tokenizer, one folder per version.

A policy names its weights by a digest (`weights`) that does not depend on how they are cut into
files, so that traces, metrics and other runs can name them too.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    read_commit,
    sha256_of_file,
)
from pipeline.run.parse import same
from pipeline.run.weights import (
    SUFFIX,
    WeightsFile,
    read_stored_weights,
    read_weights,
    weights_digest,
)
from pipeline.store.base import Store

WEIGHTS = "weights_sha256"
"""The key of the weights digest in a policy's commit."""


@dataclass(frozen=True)
class FolderDigests:
    """Digests of a policy in a folder."""

    weights: str
    files: str
    """As policies and metrics of older runs have it (`policy_digest`)."""


def policy_digest(files: Iterable[DataFile]) -> str:
    """SHA-256 over the name and SHA-256 of each weights file, in order of name.

    Older runs have it as "sha256" in place of the weights digest.
    """
    weights = sorted((_name(f), f.sha256) for f in files if _is_weights(f))
    return hashlib.sha256("".join(f"{name} {sha}\n" for name, sha in weights).encode()).hexdigest()


def digests_of(folder: Path) -> FolderDigests:
    """The digests of a folder's weights. Raises ValueError for a file that is not whole."""
    read = {path: read_weights(path) for path in sorted(folder.glob(f"*{SUFFIX}"))}
    files = [DataFile(path.name, path.stat().st_size, of.sha256) for path, of in read.items()]
    return FolderDigests(weights_digest(read.values()), policy_digest(files))


def publish_policy(store: Store, version: int, folder: Path) -> Committed:
    """Write every file of a folder as a policy version and commit it.

    When another writer was first, `ours` is False and `body` has its policy's digest
    (`stored_digest`). Raises ValueError for weights that are not whole; StoreError.
    """
    write_id = new_write_id()
    files: list[DataFile] = []
    weights: list[WeightsFile] = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.suffix == SUFFIX:
            weights.append(read_weights(path))
        digest = weights[-1].sha256 if path.suffix == SUFFIX else sha256_of_file(path)
        key = keys.policy_file(version, write_id, path.name)
        store.create_from_file(key, path)
        files.append(DataFile(key, path.stat().st_size, digest))
    return _commit(store, version, files, weights_digest(weights), write_id)


def refer_policy(
    store: Store, version: int, files: Sequence[DataFile], weights_sha256: str
) -> Committed:
    """Commit a policy version whose files are already in the store (the staged model)."""
    return _commit(store, version, files, weights_sha256, new_write_id())


def fetch_policy(store: Store, version: int, folder: Path) -> str:
    """Download a policy version into a folder, each file checked, and return its weights digest.

    Memory is bounded, however large the files are. Version 0 is the model of the run's description:
    where that was amended, the commit of policy 0 still lists the files of run.json.
    Raises ObjectMissingError, CorruptObjectError (also for a commit of something else), StoreError.
    """
    files, digest = _read_policy(store, version)
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        fetch_file(store, file, folder / _name(file))
    if digest is not None:
        return digest
    return _united(store, version, (read_weights(folder / _name(f)) for f in _weights(files)))


def weights_of(store: Store, version: int) -> str:
    """The weights digest of a policy version; the model of an amended run is read for it.

    Raises the errors of `fetch_policy`.
    """
    files, digest = _read_policy(store, version)
    if digest is not None:
        return digest
    return stored_weights(store, version, files)


def stored_weights(store: Store, version: int, files: Iterable[DataFile]) -> str:
    """The weights digest of files that are in the store, read as a whole in bounded memory.

    Raises ObjectMissingError, CorruptObjectError, StoreError.
    """
    return _united(store, version, (read_stored_weights(store, f) for f in _weights(files)))


def stored_digest(body: Mapping[str, Any]) -> str:
    """The digest in a policy's commit: of its weights, or, in an older run, of its files."""
    return str(body[WEIGHTS] if WEIGHTS in body else body["sha256"])


def _read_policy(store: Store, version: int) -> tuple[list[DataFile], str | None]:
    """A policy's files, and its weights digest; None: nothing says it."""
    body = read_commit(store, keys.policy(version))
    if not same(body.get("version"), version) or not {WEIGHTS, "sha256"} & body.keys():
        raise CorruptObjectError(
            f"{keys.policy(version)} in {store.uri}: found a commit of version "
            f"{body.get('version')!r} with {sorted(body)}, expected that of policy {version}; "
            "restore the object"
        )
    for amendment in reversed(read_amendments(store) if version == 0 else ()):
        if "model" in amendment.inputs:
            return list(amendment.changes["inputs.model"].values()), None
    return files_in(body), body.get(WEIGHTS)


def _united(store: Store, version: int, weights: Iterable[WeightsFile]) -> str:
    try:
        return weights_digest(weights)
    except ValueError as error:
        raise CorruptObjectError(
            f"{keys.policy(version)} in {store.uri}: its weights: {error}"
        ) from error


def _commit(
    store: Store, version: int, files: Sequence[DataFile], weights_sha256: str, write_id: str
) -> Committed:
    body = {"version": version, WEIGHTS: weights_sha256, "files": file_list(files)}
    return commit(store, keys.policy(version), body, write_id)


def _weights(files: Iterable[DataFile]) -> list[DataFile]:
    return [file for file in files if _is_weights(file)]


def _is_weights(file: DataFile) -> bool:
    return file.key.endswith(SUFFIX)


def _name(file: DataFile) -> str:
    return file.key.rsplit("/", 1)[-1]
