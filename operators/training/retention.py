"""Which checkpoints a restart may begin at, and which policies and checkpoints may go."""

from collections.abc import Collection

from pipeline.store import Store, keys


def restarts(store: Store) -> list[int]:
    """Versions of the checkpoints that a restart may begin at, ascending.

    Metrics are the last commit of a step. A checkpoint whose step has none does not count: the step
    that made it must be trained again from the one before, or its metrics would never be written.
    """
    return [
        version
        for version in _committed(store, keys.checkpoints())
        if store.size(keys.metrics(version - 1)) is not None
    ]


def expired(
    policies: Collection[int], checkpoints: Collection[int], save_freq: int, max_staleness: int
) -> tuple[list[int], list[int]]:
    """Versions of policies and of checkpoints that nobody needs any more, ascending.

    Kept: the last two checkpoints; every policy that rollouts or a restart from the older of them
    may ask for (step n uses policy max(0, n - max_staleness), and a restart from the checkpoint of
    version c goes on at step c); every save_freq-th policy, policy 0 (the reference) among them.
    With fewer than two checkpoints a restart may have to begin at policy 0, and nothing goes.
    """
    if len(checkpoints) < 2:
        return [], []
    oldest_restart = sorted(checkpoints)[-2]
    oldest_policy = oldest_restart - max_staleness
    return (
        [v for v in sorted(policies) if v < oldest_policy and v % save_freq],
        [v for v in sorted(checkpoints) if v < oldest_restart],
    )


def prune(store: Store, save_freq: int, max_staleness: int) -> tuple[list[int], list[int]]:
    """Delete what has expired and say which versions of policies and checkpoints went.

    One process calls. A commit object goes before its files, so that nobody finds a commit whose
    files are gone; what an interrupted call leaves is debris.
    """
    policies, checkpoints = expired(
        _committed(store, keys.policies()),
        restarts(store),
        save_freq,
        max_staleness,
    )
    for commits in (map(keys.policy, policies), map(keys.checkpoint, checkpoints)):
        for key in commits:
            store.delete(key)
            for info in store.list(key.rsplit("/", 1)[0] + "/"):
                store.delete(info.key)
    return policies, checkpoints


def _committed(store: Store, prefix: str) -> list[int]:
    found = (keys.number_of(info.key) for info in store.list(prefix))
    return sorted(version for version in found if version is not None)
