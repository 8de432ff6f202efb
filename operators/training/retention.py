"""Retention: the policies and checkpoints of a run that the trainer may remove.

Reading a difference requires its chain, so the chain of every kept policy stays:

    5 whole, 6, 7, 8 differences; 7 is kept ──► 5 and 6 stay for it, 8 may be removed
"""

from collections import defaultdict
from collections.abc import Collection, Mapping

from pipeline.policies.versions import is_difference_file
from pipeline.run import keys
from pipeline.run.commit import find_commit
from pipeline.run.plan import find_plan
from pipeline.run.restarts import KEPT, restarts
from pipeline.store import Store


def expired(
    policies: Collection[int],
    checkpoints: Collection[int],
    restarts: Collection[int],
    save_freq: int,
    max_staleness: int,
) -> tuple[list[int], list[int]]:
    """Return the versions of policies and of checkpoints that training no longer needs, ascending.

    The following are kept:

    - the last KEPT checkpoints from which a restart may begin, and all newer ones;
    - every policy that rollouts may need, now or after a restart from the oldest of these
      checkpoints. Step n uses policy max(0, n - max_staleness), and a restart from the checkpoint
      of version c continues at step c;
    - every save_freq-th policy, including policy 0 (the reference).

    With fewer than KEPT of these checkpoints, a restart may have to begin at policy 0, so nothing
    expires.

    Args:
        policies: Versions of the policies that have at least one object.
        checkpoints: Versions of the checkpoints that have at least one object.
        restarts: Versions of the checkpoints from which a restart may begin.
        save_freq: Steps between two checkpoints.
        max_staleness: Maximum number of versions by which the policy of a rollout may lag behind
            the step.
    """
    if len(restarts) < KEPT:
        return [], []
    oldest_restart = sorted(restarts)[-KEPT]
    oldest_policy = oldest_restart - max_staleness
    return (
        [v for v in sorted(policies) if v < oldest_policy and v % save_freq],
        [v for v in sorted(checkpoints) if v < oldest_restart],
    )


def remove_expired(store: Store, save_freq: int, max_staleness: int) -> tuple[list[int], list[int]]:
    """Remove expired policies and checkpoints; return their versions, ascending.

    Only one process may call this. A policy whose validation is planned but incomplete stays until
    the validation is complete. The chain of every policy that stays is kept. A commit is removed
    before its files, so that no reader finds a commit without files. The next call removes the
    remains of an interrupted call, and the files from a trainer that died before its commit.

    Args:
        store: The run's store.
        save_freq: Steps between two checkpoints.
        max_staleness: Maximum number of versions by which the policy of a rollout may lag behind
            the step.
    """
    files = _policy_files(store)
    policies, checkpoints = expired(
        files,
        _folders(store, keys.checkpoints()),
        restarts(store),
        save_freq,
        max_staleness,
    )
    kept = files.keys() - set(policies) | pending_validations(store)
    policies = sorted(files.keys() - _with_chains(store, kept, files))
    # A version is removed before its base, so that no reader finds an incomplete chain.
    for commits in (map(keys.policy, reversed(policies)), map(keys.checkpoint, checkpoints)):
        for key in commits:
            store.delete(key)
            for info in store.list(key.rsplit("/", 1)[0] + "/"):
                store.delete(info.key)
    return policies, checkpoints


def pending_validations(store: Store) -> set[int]:
    """Return the policy versions with a validation plan whose shards are not all committed."""
    pending = set()
    for version in _folders(store, keys.validations()):
        plan = find_plan(store, keys.validation_plan(version))
        if plan is not None and any(
            store.size(plan.shard_key(shard)) is None for shard in range(plan.shards)
        ):
            pending.add(version)
    return pending


def _folders(store: Store, prefix: str) -> list[int]:
    """Return the versions with at least one object under a prefix, committed or not, ascending."""
    found = {keys.folder_number(info.key) for info in store.list(prefix)}
    return sorted(version for version in found if version is not None)


def _policy_files(store: Store) -> dict[int, set[str]]:
    """Return the object keys of each policy version that has any objects, committed or not."""
    found: dict[int, set[str]] = defaultdict(set)
    for info in store.list(keys.policies()):
        version = keys.folder_number(info.key)
        if version is not None:
            found[version].add(info.key)
    return found


def _with_chains(
    store: Store, kept: Collection[int], files: Mapping[int, Collection[str]]
) -> set[int]:
    """Return the kept versions and the versions in their chains."""
    found = set(kept)
    for version in sorted(files, reverse=True):
        if version in found and _needs_base(store, version, files[version]):
            found.add(version - 1)
    return found


def _needs_base(store: Store, version: int, found: Collection[str]) -> bool:
    """Return whether a version is a difference, according to the names of its objects.

    The commit is read only if several writers left files. This saves a request for most versions. A
    version with shares and no other files is a difference in which nothing changed.
    """
    own = {keys.policy(version)}
    files = {key for key in found if key not in own and not keys.is_share(key)}
    differences = {key for key in files if is_difference_file(key)}
    if len({keys.maker_of(key) for key in found if key not in own}) > 1:
        body = find_commit(store, keys.policy(version))
        return body is None or "difference" in body
    return differences == files and len(found) > len(own)
