"""Retention: the policies and checkpoints of a run that may be removed."""

from collections.abc import Collection

from pipeline.run import keys
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
    """Versions of policies and of checkpoints that training no longer needs, ascending.

    `policies` and `checkpoints` are the versions with any object, `restarts` the checkpoints at
    which a restart may begin. Kept are the last KEPT of these and newer ones; every policy that
    rollouts or a restart from the oldest of them may need (step n uses policy
    max(0, n - max_staleness), and a restart from the checkpoint of version c continues at step c);
    every save_freq-th policy, including policy 0 (the reference).
    With fewer, a restart may have to begin at policy 0, and nothing expires.
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
    """Remove expired policies and checkpoints; return their versions.

    One process calls. A policy whose validation is planned but incomplete stays until it is
    complete. A commit object is removed before its files, so that no reader finds a commit without
    files. The next call removes what an interrupted call, or a trainer that died before its commit,
    has left.
    """
    policies, checkpoints = expired(
        _folders(store, keys.policies()),
        _folders(store, keys.checkpoints()),
        restarts(store),
        save_freq,
        max_staleness,
    )
    pending = pending_validations(store)
    policies = [version for version in policies if version not in pending]
    for commits in (map(keys.policy, policies), map(keys.checkpoint, checkpoints)):
        for key in commits:
            store.delete(key)
            for info in store.list(key.rsplit("/", 1)[0] + "/"):
                store.delete(info.key)
    return policies, checkpoints


def pending_validations(store: Store) -> set[int]:
    """Policy versions with a validation plan whose shards are not all committed."""
    pending = set()
    for version in _folders(store, keys.validations()):
        plan = find_plan(store, keys.validation_plan(version))
        if plan is not None and any(
            store.size(plan.shard_key(shard)) is None for shard in range(plan.shards)
        ):
            pending.add(version)
    return pending


def _folders(store: Store, prefix: str) -> list[int]:
    """Versions with any object, committed or not, ascending."""
    found = {keys.folder_number(info.key) for info in store.list(prefix)}
    return sorted(version for version in found if version is not None)
