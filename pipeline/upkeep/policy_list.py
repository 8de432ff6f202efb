"""The policy versions of a run: their kinds (whole or difference), sizes and defects.

Only the versions' commits are read, not their weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.policies.versions import PolicyVersion, check_base, read_version
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.store import ObjectMissingError, Store


@dataclass(frozen=True)
class ListedPolicy:
    """A committed policy version."""

    version: int
    base: int | None
    """The version on which this difference is based; None for a whole version."""
    size: int
    """The total size of the version's files in bytes."""
    chain_size: int
    """The total size of all files in the version's chain in bytes."""
    weights_sha256: str | None
    """The weights digest; None if no commit contains it, as in older runs."""
    problem: str
    """The reason why the version cannot be fetched, as far as commits show; empty if no reason is
    known."""


def list_policies(store: Store) -> Iterator[ListedPolicy]:
    """Yield the committed policy versions, in ascending order. Raises StoreError."""
    sizes = {info.key: info.size for info in store.list(keys.policies())}
    before: tuple[PolicyVersion, ListedPolicy] | None = None
    for version in sorted(v for v in map(keys.number_of, sizes) if v is not None):
        if keys.policy(version) not in sizes:
            continue
        try:
            policy = read_version(store, version)
        except CorruptObjectError as error:
            before = None
            yield ListedPolicy(version, None, 0, 0, None, str(error))
            continue
        except ObjectMissingError:  # removed since it was listed
            continue
        listed = _listed(store, policy, before, sizes)
        before = policy, listed
        yield listed


def _listed(
    store: Store,
    policy: PolicyVersion,
    before: tuple[PolicyVersion, ListedPolicy] | None,
    sizes: dict[str, int],
) -> ListedPolicy:
    size = chain_size = sum(file.size for file in policy.files)
    problem, base = _missing(store, policy, sizes), None
    if policy.difference is not None:
        base = policy.difference.base
        if before is None or before[0].version != base:
            problem = problem or f"it is the difference from policy {base}, which does not exist"
        else:
            chain_size += before[1].chain_size
            problem = problem or _of_base(store, policy, *before)
    return ListedPolicy(policy.version, base, size, chain_size, policy.weights_sha256, problem)


def _of_base(store: Store, policy: PolicyVersion, base: PolicyVersion, listed: ListedPolicy) -> str:
    if listed.problem:
        return f"it is the difference from policy {base.version}, which cannot be fetched"
    try:
        check_base(store, policy, base)
    except CorruptObjectError as error:
        return str(error)
    return ""


def _missing(store: Store, policy: PolicyVersion, sizes: dict[str, int]) -> str:
    for file in (*policy.files, *policy.tensors):
        size = sizes[file.key] if file.key in sizes else store.size(file.key)
        if size != file.size:
            found = "is missing" if size is None else f"has {size} bytes, expected {file.size}"
            return f"{file.key} {found}"
    return ""
