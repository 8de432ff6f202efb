"""Uses of a run's inputs: an input may be amended until a commit uses it.

A start that amends the run may race with the workers of earlier attempts. The start ends those
attempts and looks for uses of the inputs. It does so for the last time right before it commits the
amendment. A worker looks for amendments right before it commits a shard, and records the number of
amendments in the commit. These numbers later reveal a shard that was committed after the start's
last check.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from pipeline.run import keys
from pipeline.run.amendments import AmendedError, Amendment, read_amendments
from pipeline.run.commit import read_commit
from pipeline.store.base import Store

AMENDMENTS = "amendments"
"""The key, in a shard's commit, of the number of amendments that its worker took into account."""


def first_use(store: Store, name: str) -> str | None:
    """Return the key of the first commit that used an input; None if the input is still unused.

    The shards of steps and validations use the reward function, the training prompts and the model.
    A step that is sealed from a recorded set uses the training prompts and the model. Policy
    versions after version 0 use the model and users' estimators and losses. Only the shards of
    validations use the validation prompts.
    """
    return next(_uses(store, name), None)


def outdated_by(store: Store, key: str, amendments: Sequence[Amendment]) -> Amendment | None:
    """Return the first amendment that a shard's worker should have applied but did not.

    A worker looks for amendments right before it commits. A shard is outdated if its commit was
    still on its way to the store when a later start amended the run.

    Args:
        store: The run.
        key: The shard's commit.
        amendments: All amendments to the run, in ascending order.

    Returns:
        The amendment; None if the shard is not outdated.

    Raises:
        ObjectMissingError: The shard is not committed.
        CorruptObjectError: The commit is damaged.
    """
    if not amendments:
        return None
    body = read_commit(store, key)
    maker = body.get("maker")  # in a step's shard, it contains the amendment count
    known = body.get(AMENDMENTS, maker.get(AMENDMENTS, 0) if isinstance(maker, Mapping) else 0)
    own = "val_prompts" if key.startswith(keys.validations()) else "prompts"
    number = keys.folder_number(key) or 0
    for one in amendments[known:] if isinstance(known, int) else ():
        # An amendment to the validation prompts applies to all validations, because no validation's
        # shard had been committed when the run was amended.
        holds = one.from_step <= number or own == "val_prompts" in one.inputs
        if holds and one.inputs & {"reward", "model", own}:
            return one
    return None


def outdated_shards(
    store: Store, amendments: Sequence[Amendment], left_out: Container[int] = ()
) -> Iterator[tuple[str, Amendment]]:
    """Yield outdated shards.

    Args:
        store: The run.
        amendments: All amendments to the run, in ascending order.
        left_out: Steps to skip.

    Yields:
        The key of each outdated shard of a step or validation, and the amendment that outdates it.
    """
    for prefix in (keys.steps(), keys.validations()) if amendments else ():
        for info in store.list(prefix):
            skipped = prefix == keys.steps() and keys.folder_number(info.key) in left_out
            if keys.commits_shard(info.key) and not skipped:
                one = outdated_by(store, info.key, amendments)
                if one is not None:
                    yield info.key, one


def refuse_outdated(store: Store, shards: Iterable[str]) -> None:
    """Raise AmendedError if one of these shards is outdated."""
    amendments = read_amendments(store)
    for key in shards:
        one = outdated_by(store, key, amendments)
        if one is not None:
            raise AmendedError(f"{key} in {store.uri}: {outdated_text(one)}")


def outdated_text(amendment: Amendment) -> str:
    """Return a text that explains why a shard is outdated by an amendment."""
    return (
        f"a worker of an earlier start committed this shard while "
        f"{keys.amendment(amendment.number)} was being written, so the shard was made with inputs "
        "that the run no longer uses; begin a new run"
    )


def _uses(store: Store, name: str) -> Iterator[str]:
    if name not in ("val_prompts", "functions"):
        for info in store.list(keys.steps()):
            sealed = info.key == keys.manifest(keys.folder_number(info.key) or 0)
            if keys.commits_shard(info.key) or (sealed and name != "reward"):
                yield info.key
    for info in store.list(keys.validations()) if name != "functions" else ():
        if keys.commits_shard(info.key):
            yield info.key
    if name in ("model", "functions"):
        for info in store.list(keys.policies()):
            version = keys.number_of(info.key)
            if version and info.key == keys.policy(version):
                yield info.key
