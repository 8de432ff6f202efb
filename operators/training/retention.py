"""Which policies and checkpoints of a run may go."""

from collections.abc import Collection

from pipeline.store import Store, keys
from pipeline.store.commit import find_commit
from pipeline.store.restarts import restarts


def expired(
    policies: Collection[int],
    checkpoints: Collection[int],
    restarts: Collection[int],
    save_freq: int,
    max_staleness: int,
) -> tuple[list[int], list[int]]:
    """Versions of policies and of checkpoints that no training needs any more, ascending.

    `policies` and `checkpoints` are all there is something of, `restarts` the checkpoints that a
    restart may begin at. Kept: the last two of these, and what is newer; every policy that rollouts
    or a restart from the older of them may ask for (step n uses policy max(0, n - max_staleness),
    and a restart from the checkpoint of version c goes on at step c); every save_freq-th policy,
    policy 0 (the reference) among them.
    With fewer than two a restart may have to begin at policy 0, and nothing goes.
    """
    if len(restarts) < 2:
        return [], []
    oldest_restart = sorted(restarts)[-2]
    oldest_policy = oldest_restart - max_staleness
    return (
        [v for v in sorted(policies) if v < oldest_policy and v % save_freq],
        [v for v in sorted(checkpoints) if v < oldest_restart],
    )


def prune(store: Store, save_freq: int, max_staleness: int) -> tuple[list[int], list[int]]:
    """Delete what has expired and say which versions of policies and checkpoints went.

    One process calls. A policy whose validation is planned and not complete stays until it is. A
    commit object goes before its files, so that nobody finds a commit whose files are gone; what
    an interrupted call leaves, or a trainer that died before its commit, goes with the next call.
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
    """Policy versions with a validation plan of which not every shard is committed."""
    pending = set()
    for version in _folders(store, keys.validations()):
        plan = find_commit(store, keys.validation_plan(version))
        if plan is not None and any(
            store.size(keys.validation(version, shard)) is None for shard in range(plan["shards"])
        ):
            pending.add(version)
    return pending


def _folders(store: Store, prefix: str) -> list[int]:
    """Versions of which there is any object, committed or not, ascending."""
    found = {keys.folder_number(info.key) for info in store.list(prefix)}
    return sorted(version for version in found if version is not None)
