"""Uses of a run's inputs: an attempt may stage an input again while no commit depends on it.

Such a start may race with the workers of earlier attempts. It ends those attempts, and looks for
commits right before it writes its attempt. A worker looks for a later attempt right before it
commits, and records the number of its attempt in the commit. This number reveals a shard whose
commit was on its way during the start's last check.
"""

from collections.abc import Iterable

from pipeline.run import keys
from pipeline.run.commit import parsing, read_commit
from pipeline.run.parse import Count, typed
from pipeline.run.restarts import attempt_count
from pipeline.store.base import Store, StoreError

ATTEMPT = "attempt_number"
"""The key, in the `maker` of a shard's commit, of the number of its worker's attempt."""


class SupersededError(StoreError):
    """A later attempt of the run has begun; the workers of this one must not commit."""


_DEPENDENT = {"val_prompts": (keys.validations(),), "functions": (keys.policies(),)}
"""Where objects that depend on an input are; those of all other inputs are everywhere."""


def first_use(store: Store, name: str) -> str | None:
    """Return the key of the first commit that depends on an input; None if there is none.

    These are the shards of steps and validations, sealed steps, and trained policies. Only
    validations depend on the validation prompts, and only trained policies on users' estimators and
    losses.
    """
    everywhere = (keys.steps(), keys.validations(), keys.policies())
    for prefix in _DEPENDENT.get(name, everywhere):
        for info in store.list(prefix):
            number = keys.number_of(info.key)
            sealed = number is not None and info.key == keys.manifest(number)
            trained = bool(number) and info.key == keys.policy(number or 0)
            if keys.commits_shard(info.key) or sealed or trained:
                return info.key
    return None


def refuse_superseded(store: Store, attempt: int) -> None:
    """Raise SupersededError if the run has a later attempt than this worker's.

    The check is needed because a worker may not have noticed that its attempt has ended.
    """
    key = keys.attempt(attempt + 1)
    if store.size(key) is not None:
        raise SupersededError(
            f"{key} in {store.uri}: a later start of the run has its own workers; nothing more is "
            "committed here"
        )


def outdated_shards(store: Store, shards: Iterable[str]) -> list[str]:
    """Return the shards that were generated with inputs that the run no longer uses.

    Raises StoreError, and CorruptObjectError for a damaged commit.
    """
    newest = attempt_count(store) - 1
    if newest < 0:
        return []
    body = read_commit(store, keys.attempt(newest))
    with parsing(store, keys.attempt(newest)):
        since = typed(body, "inputs_since", Count)
    if not since:
        return []
    makers = {key: read_commit(store, key).get("maker") or {} for key in shards}
    return [key for key, maker in makers.items() if maker.get(ATTEMPT, 0) < since]


def refuse_outdated(store: Store, shards: Iterable[str]) -> None:
    """Raise SupersededError if one of these shards is outdated."""
    for key in outdated_shards(store, shards):
        raise SupersededError(f"{key} in {store.uri}: {OUTDATED}")


OUTDATED = (
    "a worker of an earlier start committed this shard while a later start staged other inputs, so "
    "the shard was made with inputs that the run no longer uses; begin a new run"
)
