"""Policy versions in the store: whole versions, and differences from the previous version.

A whole version is a Hugging Face folder with safetensors files, config and tokenizer. A difference
holds the changes to tensors since the previous version (docs/trace-format.md). Reading a version
requires its chain. The chain of a difference consists of the latest whole version before it, and
all differences from there up to the difference itself. The chain of a whole version contains only
that version.

    policies/000005/policy.json   whole                        ┐
    policies/000006/policy.json   a difference, base 5         ├ the chain of policy 7
    policies/000007/policy.json   a difference, base 6         ┘

A policy's commit contains the digest of the weights. The digest does not depend on how the
tensors are divided among files. Traces, metrics and other runs can therefore use it to refer to the
same weights.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.policies.tensors import (
    StoredTensor,
    read_share,
    refuse_other_tensors,
    tensors_by_name,
)
from pipeline.policies.weights import (
    SUFFIX,
    WeightsFile,
    read_stored_weights,
    read_weights,
    weights_digest,
)
from pipeline.run import keys
from pipeline.run.commit import (
    Committed,
    CorruptObjectError,
    DataFile,
    commit,
    file_list,
    files_in,
    new_write_id,
    parsing,
    read_commit,
    sha256_of_file,
    write_id_of,
)
from pipeline.run.description import description_now, newest_changes
from pipeline.run.parse import Digest, typed
from pipeline.store.base import ObjectMissingError, Store

WEIGHTS = "weights_sha256"
"""The key of the weights digest in a policy's commit."""
_DIFFERENCE_FILE = re.compile(r"difference-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True)
class Difference:
    """The base of a version that is a difference. Example: Difference(6, '5f0c...')."""

    base: int
    """The previous version."""
    base_weights_sha256: str
    """The previous version's weights digest."""


@dataclass(frozen=True)
class PolicyVersion:
    """A committed policy version."""

    version: int
    weights_sha256: str | None
    """The weights digest; None if not recorded, as for a model that an attempt staged again."""
    files: tuple[DataFile, ...]
    """For a whole version, the files of a Hugging Face folder; for a difference, the difference
    files, or none if no tensor has changed."""
    tensors: tuple[DataFile, ...] = ()
    """The shares, which list the version's tensors; empty for the staged model."""
    difference: Difference | None = None
    """The base; None if the version is whole."""

    @property
    def size(self) -> int:
        """The total size of the version's files in bytes."""
        return sum(file.size for file in self.files)


def publish_policy(store: Store, version: int, folder: Path) -> Committed:
    """Write every file of a folder as a policy version and commit it.

    Args:
        store: The store of the run.
        version: The policy version.
        folder: A Hugging Face folder; its subfolders are ignored.

    Returns:
        The commit. If another writer committed first, `ours` is False and `body` is that writer's
        commit, which contains its weights digest (WEIGHTS).

    Raises:
        ValueError: A weights file is incomplete.
        StoreError: A file or the commit cannot be written.
    """
    write_id = new_write_id()
    files: list[DataFile] = []
    weights: list[WeightsFile] = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        if path.suffix == SUFFIX:
            weights.append(read_weights(path))
        digest = weights[-1].sha256 if path.suffix == SUFFIX else sha256_of_file(path)
        key = keys.policy_file(version, write_id, path.name)
        store.upload_file(key, path)
        files.append(DataFile(key, path.stat().st_size, digest))
    policy = PolicyVersion(version, weights_digest(weights), tuple(files))
    return commit_version(store, policy, write_id)


def refer_policy(
    store: Store, version: int, files: Sequence[DataFile], weights_sha256: str
) -> Committed:
    """Commit a policy version whose files are already stored, such as those of the staged model.

    Args:
        store: The store of the run.
        version: The policy version.
        files: The files, under the keys of the staged model.
        weights_sha256: The weights digest of the files.
    """
    return commit_version(store, PolicyVersion(version, weights_sha256, tuple(files)))


def commit_version(store: Store, policy: PolicyVersion, write_id: str | None = None) -> Committed:
    """Commit a policy version whose files and shares are already in the store.

    Args:
        store: The store of the run.
        policy: The version.
        write_id: The write id in the names of its files and shares; None generates a new one.

    Returns:
        The commit. If another writer committed first, `ours` is False and `body` is that writer's
        commit, which contains its weights digest (WEIGHTS).

    Raises:
        CorruptObjectError: `read_version` would refuse the version; nothing was committed.
        StoreError: The commit cannot be written.
    """
    key, write_id = keys.policy(policy.version), write_id or new_write_id()
    body: dict[str, Any] = {
        "version": policy.version,
        WEIGHTS: policy.weights_sha256,
        "files": file_list(policy.files),
    }
    if policy.tensors:
        body["tensors"] = file_list(policy.tensors)
    if policy.difference is not None:
        body["difference"] = asdict(policy.difference)
    parse_version({**body, "attempt": write_id}, policy.version, store.uri)
    return commit(store, key, body, write_id)


def read_version(store: Store, version: int) -> PolicyVersion:
    """Return a committed policy version.

    Version 0 is the run's model. If an attempt has staged another model, the commit of policy 0
    still lists the files of run.json, and this function returns the attempt's. Raises
    ObjectMissingError and StoreError. Raises CorruptObjectError if the commit is damaged or belongs
    to a different version.
    """
    found = parse_version(read_commit(store, keys.policy(version)), version, store.uri)
    if version == 0 and "inputs.model" in newest_changes(store):
        return PolicyVersion(version, None, tuple(description_now(store).inputs.model.values()))
    return found


def parse_version(body: Mapping[str, Any], version: int, uri: str) -> PolicyVersion:
    """Return the policy version that a commit describes.

    Args:
        body: The commit's JSON object.
        version: The version that the commit must describe.
        uri: The store's URI, for messages.

    Raises:
        CorruptObjectError: The commit is not valid for this version; the message gives the
            commit's key.
    """
    place = f"{keys.policy(version)} in {uri}"
    if body.get("version") != version or WEIGHTS not in body:
        raise CorruptObjectError(
            f"{place}: found a commit of version {body.get('version')!r} with {sorted(body)}, "
            f"expected that of policy {version}; restore the object"
        )
    try:
        weights = typed(body, WEIGHTS, Digest | None)
        files = tuple(files_in(body))
        difference = typed(body, "difference", Difference) if "difference" in body else None
        tensors = tuple(files_in(body, "tensors") if "tensors" in body else ())
        found = PolicyVersion(version, weights, files, tensors, difference)
        if "tensors" in body or difference is not None:
            _refuse_odd(found, write_id_of(body))
    except (CorruptObjectError, ValueError) as error:
        raise CorruptObjectError(f"{place}: {error}; restore the object") from error
    return found


def chain(store: Store, version: int) -> list[PolicyVersion]:
    """Return the chain of a version: the whole version first, then the differences in order.

    This function reads commits but no data files. Raises an ObjectMissingError that names
    the missing version and the version that needs it. Raises CorruptObjectError if a base does not
    have the weights digest that the difference requires. Also raises StoreError.
    """
    found = [read_version(store, version)]
    while (difference := found[-1].difference) is not None:
        above = keys.policy(found[-1].version)
        try:
            base = read_version(store, difference.base)
        except ObjectMissingError as error:
            raise ObjectMissingError(
                f"{above} in {store.uri}: the chain of policy {version} needs policy "
                f"{difference.base}, whose commit {keys.policy(difference.base)} is missing; "
                "restore it, or use a version whose chain is complete"
            ) from error
        check_base(store, found[-1], base)
        found.append(base)
    return found[::-1]


def check_base(store: Store, policy: PolicyVersion, base: PolicyVersion) -> None:
    """Raise CorruptObjectError unless a base has the weights that the difference requires.

    Args:
        store: The store of the run.
        policy: The version to check; a whole version always passes.
        base: The previous version.
    """
    difference = policy.difference
    if difference is None:
        return
    if base.weights_sha256 != difference.base_weights_sha256 or not base.tensors:
        raise CorruptObjectError(
            f"{keys.policy(policy.version)} in {store.uri}: found a difference from weights "
            f"{difference.base_weights_sha256[:16]}..., but {keys.policy(base.version)} has "
            f"{str(base.weights_sha256)[:16]}... and {len(base.tensors)} shares; restore both"
        )


def read_tensors(store: Store, policy: PolicyVersion) -> dict[str, StoredTensor]:
    """Return the tensors of a version, keyed by name, as its shares list them.

    The result is complete and has the version's weights digest. It is empty for a version without
    shares. Raises a CorruptObjectError that names the share or commit. Also raises
    ObjectMissingError and StoreError.
    """
    if not policy.tensors or policy.weights_sha256 is None:
        return {}
    files = {file_name(file): file for file in policy.files}
    whole = policy.difference is None
    found, listed = [], []
    for share in policy.tensors:
        its_files, its_tensors = read_share(store, share, policy.version, files, whole)
        listed += its_files
        found += its_tensors
    with parsing(store, keys.policy(policy.version)):
        if sorted(listed) != sorted(files):
            raise ValueError(
                f"the commit lists files {sorted(files)}, but its shares list {sorted(listed)}"
            )
        return tensors_by_name(found, policy.weights_sha256)


def check_fits(
    store: Store,
    policy: PolicyVersion,
    tensors: Mapping[str, StoredTensor],
    before: Mapping[str, StoredTensor],
) -> None:
    """Raise CorruptObjectError if a difference's tensors do not match those of its base.

    Args:
        store: The store of the run.
        policy: The difference.
        tensors: Its tensors, keyed by name.
        before: The tensors of its base, keyed by name.
    """
    with parsing(store, keys.policy(policy.version)):
        refuse_other_tensors(tensors, before)


def weights_of(store: Store, version: int) -> str:
    """Return the weights digest of a policy version.

    If the digest is not recorded, for example for a model that an attempt staged again, this
    function reads all weights to compute it. Raises ObjectMissingError, CorruptObjectError and
    StoreError.
    """
    policy = read_version(store, version)
    if policy.weights_sha256 is not None:
        return policy.weights_sha256
    return stored_weights(store, version, policy.files)


def stored_weights(store: Store, version: int, files: Iterable[DataFile]) -> str:
    """Compute the weights digest of files in the store, in bounded memory.

    Args:
        store: The store of the run.
        version: The policy version, for messages.
        files: The version's files; those without weights are skipped.

    Raises:
        ObjectMissingError: A file is missing.
        CorruptObjectError: A file is damaged, or a tensor is in two files.
        StoreError: The store cannot be read.
    """
    return united(store, version, (read_stored_weights(store, f) for f in weights_files(files)))


def united(store: Store, version: int, weights: Iterable[WeightsFile]) -> str:
    """Return the weights digest of a policy's files.

    Args:
        store: The store of the run, for messages.
        version: The policy version, for messages.
        weights: The version's weights files.

    Raises:
        CorruptObjectError: A file is damaged, or a tensor is in two files.
    """
    try:
        return weights_digest(weights)
    except ValueError as error:
        raise CorruptObjectError(
            f"{keys.policy(version)} in {store.uri}: weights: {error}; restore the object"
        ) from error


def _refuse_odd(policy: PolicyVersion, write_id: str) -> None:
    """Raise ValueError unless a version with shares lists only its own objects, each once."""
    if not policy.tensors or policy.weights_sha256 is None:
        raise ValueError("found no shares or no weights digest, expected both")
    made = keys.policy_file(policy.version, write_id, "").rstrip("/")
    named = [file.key for file in (*policy.files, *policy.tensors)]
    if odd := [key for key in named if keys.maker_of(key) != made]:
        raise ValueError(f"found {odd[0]}, expected only objects of its own writer, at {made}")
    if len(set(named)) != len(named):
        raise ValueError("found an object that is named twice, expected each once")
    difference = policy.difference
    if difference is None:
        return
    if difference.base != policy.version - 1:
        raise ValueError(
            f"found a difference from policy {difference.base}, expected one from policy "
            f"{policy.version - 1}, the previous version"
        )
    for file in policy.files:
        if not is_difference_file(file.key):
            raise ValueError(f"found {file.key}, expected only difference files")


def weights_files(files: Iterable[DataFile]) -> list[DataFile]:
    """Return the files of a policy that hold weights."""
    return [file for file in files if _is_weights(file)]


def _is_weights(file: DataFile) -> bool:
    return file.key.endswith(SUFFIX)


def is_difference_file(key: str) -> bool:
    """Return whether a key belongs to a difference file."""
    return _DIFFERENCE_FILE.fullmatch(key.rpartition("/")[2]) is not None


def file_name(file: DataFile) -> str:
    """Return the name of a policy's file in a folder."""
    return file.key.rsplit("/", 1)[-1]
