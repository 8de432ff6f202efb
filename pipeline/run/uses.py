"""What a run has made of its inputs so far: an input may be amended until a commit has used it.

Two sides meet here. Who amends a run ends its earlier attempts and looks for uses, last right
before the commit of the amendment. Who makes a shard looks for amendments right before the commit
of the shard, and says in it how many there were: what slips through between the two is found later.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

from pipeline.run import keys
from pipeline.run.amendments import AmendedError, Amendment, read_amendments
from pipeline.run.commit import read_commit
from pipeline.store.base import Store

AMENDMENTS = "amendments"
"""In a shard's commit: how many amendments its maker knew."""


def first_use(store: Store, name: str) -> str | None:
    """The key of the first commit that an input of a run went into; None: it is not used yet.

    The reward scores every shard, of steps and of validations. Training prompts and the model go
    into every shard too, and into steps that are sealed with a recorded set; the model into every
    later policy. Validation prompts go into validations alone, users' estimators and losses into
    later policies.
    """
    return next(_uses(store, name), None)


def outdated_by(store: Store, key: str, amendments: Sequence[Amendment]) -> Amendment | None:
    """The first amendment that should have been known to the maker of a shard, but was not.

    A worker looks for amendments right before it commits, so this takes a commit that was on its
    way while a later start amended the run. Raises ObjectMissingError, CorruptObjectError.
    """
    if not amendments:
        return None
    body = read_commit(store, key)
    maker = body.get("maker", body)  # of a step's shard; a validation's has no part of its own
    known = maker.get(AMENDMENTS, 0) if isinstance(maker, Mapping) else 0
    own = "val_prompts" if key.startswith(keys.validations()) else "prompts"
    number = keys.folder_number(key) or 0
    for one in amendments[known:] if isinstance(known, int) else ():
        # An amendment of validation prompts holds for all validations, as none is committed.
        holds = one.from_step <= number or own == "val_prompts" in one.inputs
        if holds and one.inputs & {"reward", "model", own}:
            return one
    return None


def outdated_shards(
    store: Store, amendments: Sequence[Amendment], left_out: Container[int] = ()
) -> Iterator[tuple[str, Amendment]]:
    """Yield all outdated shards of steps, except those left out, and of validations."""
    for prefix in (keys.steps(), keys.validations()) if amendments else ():
        for info in store.list(prefix):
            skipped = prefix == keys.steps() and keys.folder_number(info.key) in left_out
            if keys.commits_shard(info.key) and not skipped:
                one = outdated_by(store, info.key, amendments)
                if one is not None:
                    yield info.key, one


def refuse_outdated(store: Store, shards: Iterable[str]) -> None:
    """Raise AmendedError if one of these shards was made with inputs that are amended."""
    amendments = read_amendments(store)
    for key in shards:
        one = outdated_by(store, key, amendments)
        if one is not None:
            raise AmendedError(f"{key} in {store.uri}: {outdated_text(one)}")


def outdated_text(amendment: Amendment) -> str:
    """What is wrong with a shard that an amendment has outdated."""
    return (
        f"a worker of an earlier start committed it while {keys.amendment(amendment.number)} was "
        "being written, so it is of other inputs than the run; begin a new run"
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
