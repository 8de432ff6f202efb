"""Fetching a policy version from the store into a folder on this machine.

    whole version   files ──► reads in parallel, in order ──► SHA-256, file
    difference      files, in the same way ──► applied in place to the folder's tensors
    at the end      SHA-256 of every patched tensor, compared with the version's shares

If the folder holds an older version, only the differences after that version are applied. If some
of these differences are missing or damaged, or if they do not lead to the requested version, the
requested version's full chain is fetched.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.policies.patch import check_digests, difference_tensors, folder_tensors, patch
from pipeline.policies.tensors import StoredTensor
from pipeline.policies.versions import (
    PolicyVersion,
    chain,
    check_fits,
    file_name,
    read_tensors,
    read_version,
    united,
    weights_files,
)
from pipeline.policies.weights import Tensor, read_weights
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, DataFile, fetch_file
from pipeline.scratch import scratch_folder
from pipeline.store.base import NO_SPACE, ObjectMissingError, Store, StoreError
from pipeline.threads import in_order

log = logging.getLogger(__name__)

_FILES = 4
"""The number of files fetched at a time. Several are faster than one, because computing a file's
SHA-256 uses only one core and takes longer than reading the file."""
_LARGER = "give a folder on a larger disk"


@dataclass(frozen=True)
class Held:
    """A version in a folder. Example: Held(Path('/tmp/p'), 3, '0f3a...', {})."""

    folder: Path
    """A Hugging Face folder that engines can load."""
    version: int
    weights: str
    """The weights digest."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """The version's tensors, keyed by name. Empty for a version without shares: the staged model or
    a version of an older run."""


def fetch_policy(store: Store, version: int, folder: Path, larger: str = _LARGER) -> str:
    """Download a policy version into a folder, check everything, and return its weights digest.

    Files receive their final names only after the content of all files has been checked, so the
    folder contains none of them after an error. Memory use is bounded, however large the files are.

    Args:
        store: The store of the run.
        version: The policy version; 0 is the model of the run description.
        folder: The folder; created if missing.
        larger: How the user moves the folder to a larger disk, for the error about a full disk.

    Returns:
        The weights digest.

    Raises:
        ObjectMissingError: An object of the version's chain is missing.
        CorruptObjectError: An object is damaged, or a commit belongs to a different version.
        StoreError: The store cannot be read, or the disk is full.
    """
    whole, *differences = chain(store, version)
    folder.mkdir(parents=True, exist_ok=True)
    with _enough_space(folder, whole, differences, larger), scratch_folder("fetch", folder) as own:
        held = _patched(store, _whole(store, whole, own), differences, lambda: None)
        for path in sorted(own.iterdir()):
            os.replace(path, folder / path.name)
    return held.weights


def fetch_version(
    store: Store,
    version: int,
    folder: Path,
    before: Held | None = None,
    begin: Callable[[], object] = lambda: None,
    larger: str = _LARGER,
) -> Held:
    """Fetch a policy version into a folder, which then holds nothing else.

    Args:
        store: The store of the run.
        version: The policy version.
        folder: The folder; created if missing.
        before: The version that the folder holds now; None if it holds no version.
        begin: Called before the first byte of the folder changes. If an error occurs after this
            call, the folder holds no version.
        larger: How the user moves the folder to a larger disk, for the error about a full disk.

    Raises:
        ObjectMissingError: An object of the version's chain is missing.
        CorruptObjectError: An object is damaged.
        StoreError: The store cannot be read, or the disk is full.
    """
    following = None if before is None else _following(store, before, version)
    if before is not None and following is not None:
        try:
            with _enough_space(folder, None, following, larger):
                return _patched(store, before, following, begin)
        except (CorruptObjectError, ObjectMissingError) as error:
            log.warning("policy %d: fetching its full chain after an error: %s", version, error)
    whole, *differences = chain(store, version)
    begin()
    # Remove the former content first, because the disk may be too small for both versions.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with _enough_space(folder, whole, differences, larger):
        return _patched(store, _whole(store, whole, folder), differences, begin)


def _following(store: Store, before: Held, version: int) -> list[PolicyVersion] | None:
    """Return the differences that lead from `before` to a version.

    Returns None if any of them is missing or damaged, or if they do not lead to the version.
    """
    found, weights = [], before.weights
    for number in range(before.version + 1, version + 1):
        try:
            policy = read_version(store, number)
        except ObjectMissingError:
            return None
        except CorruptObjectError as error:
            log.warning("policy %d: fetching its full chain after an error: %s", version, error)
            return None
        if policy.difference is None or policy.difference.base_weights_sha256 != weights:
            return None
        found.append(policy)
        weights = str(policy.weights_sha256)
    return found or None


def _whole(store: Store, policy: PolicyVersion, folder: Path) -> Held:
    """Fetch a whole version."""
    tensors = {name: stored.tensor for name, stored in read_tensors(store, policy).items()}
    fetch_files(store, policy.files, folder)
    digest = policy.weights_sha256
    if digest is None:
        weights = (read_weights(folder / file_name(file)) for file in weights_files(policy.files))
        digest = united(store, policy.version, weights)
    return Held(folder, policy.version, digest, tensors)


def _patched(
    store: Store,
    before: Held,
    differences: Sequence[PolicyVersion],
    begin: Callable[[], object],
) -> Held:
    """Apply differences to the version in a folder, and then check the tensors that changed.

    Raises CorruptObjectError if a stored object or one of the folder's own files is damaged. After
    an error, the folder holds no version.
    """
    if not differences:
        return before
    held, changed = before, set()
    try:
        targets = folder_tensors(before.folder)
        for policy in differences:
            tensors = read_tensors(store, policy)
            unchanged = {name: StoredTensor(of, None) for name, of in held.tensors.items()}
            check_fits(store, policy, tensors, unchanged)
            changed |= _apply(store, policy, tensors, targets, before.folder, begin)
            now = {name: stored.tensor for name, stored in tensors.items()}
            held = Held(before.folder, policy.version, str(policy.weights_sha256), now)
        check_digests(targets, [held.tensors[name] for name in sorted(changed)])
    except (ValueError, KeyError) as error:
        raise CorruptObjectError(
            f"{keys.policy(held.version)} in {store.uri}: {error}; restore its objects"
        ) from error
    except OSError as error:
        raise StoreError(
            f"patch policy {held.version} in {before.folder}: {error}; check that folder's disk"
        ) from error
    return held


def _apply(
    store: Store,
    policy: PolicyVersion,
    tensors: Mapping[str, StoredTensor],
    targets: Mapping[str, memoryview],
    folder: Path,
    begin: Callable[[], object],
) -> set[str]:
    """Fetch one difference and apply it; return the names of the tensors that it changes."""
    coded: dict[str, memoryview] = {}
    with scratch_folder("difference", folder) as own:
        fetch_files(store, policy.files, own)
        paths = [own / file_name(file) for file in policy.files]
        for path, found in difference_tensors(paths).items():
            said = {name for name, stored in tensors.items() if stored.file == path.name}
            if odd := sorted(said ^ found.keys()):
                raise ValueError(
                    f"{path.name}: tensor {odd[0]} is in only one of the file and the shares"
                )
            coded |= found
        begin()
        patch(targets, coded)
    return set(coded)


def fetch_files(store: Store, files: Sequence[DataFile], folder: Path) -> None:
    """Download files into a folder, several at a time, and check each.

    After an error, the folder contains only files that were checked. If several files fail, the
    error for the first of them in the list is raised.

    Args:
        store: The store of the run.
        files: The files.
        folder: The folder; it must exist.

    Raises:
        ObjectMissingError: A file is missing.
        CorruptObjectError: A file is damaged.
        StoreError: The store cannot be read.
    """
    for _ in in_order(lambda f: fetch_file(store, f, folder / file_name(f)), files, _FILES):
        pass


@contextmanager
def _enough_space(
    folder: Path, whole: PolicyVersion | None, differences: Sequence[PolicyVersion], larger: str
) -> Iterator[None]:
    """Raise a StoreError if a folder's disk is too small for a fetch, or fills up during it.

    Args:
        folder: The folder that the user or a setting selects; it must exist.
        whole: The whole version to fetch; None if the folder holds the base of the differences.
        differences: The differences that are fetched. At most one of them is stored at a time.
        larger: How the user moves the folder to a larger disk.
    """
    version = [policy.version for policy in (whole, *differences) if policy is not None][-1]
    needed = max((policy.size for policy in differences), default=0)
    needed += 0 if whole is None else whole.size
    free = shutil.disk_usage(folder).free
    fix = f"free some space, or {larger}"
    if free < needed:
        raise StoreError(
            f"{folder}: found {free:,} bytes free, expected at least {needed:,} bytes to fetch "
            f"policy {version}; {fix}"
        )
    try:
        yield
    except (OSError, StoreError) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if not isinstance(cause, OSError) or cause.errno not in NO_SPACE:
            raise
        raise StoreError(
            f"{folder}: {cause.strerror} while policy {version} was fetched: {free:,} bytes were "
            f"free before, expected at least {needed:,} bytes; {fix}"
        ) from cause
