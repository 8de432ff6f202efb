"""What attempts change in a run, and the shards that are outdated by a change of inputs."""

import pytest

from pipeline.run import keys
from pipeline.run.attempts import Change, take_attempt
from pipeline.run.commit import CorruptObjectError, DataFile, commit
from pipeline.run.description import (
    changed,
    create_description,
    description_now,
    find_description,
    read_created,
)
from pipeline.run.uses import (
    ATTEMPT,
    SupersededError,
    first_use,
    outdated_shards,
    refuse_superseded,
)
from tests.attempts import dead_owner
from tests.memory_store import MemoryStore
from tests.unit.run.test_attempts import config
from tests.unit.run.test_description import RUN

CORRECTED = DataFile("inputs/9/reward.py", 9, "9" * 64)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    create_description(store, RUN)
    return store


def begin(store, **changes):
    change = Change(changes, "why") if changes else None
    return take_attempt(store, config(), dead_owner(), change=lambda: change).attempt


def test_changes_of_attempts_add_up(store):
    """run.json itself does not change."""
    assert find_description(MemoryStore()) is None
    assert description_now(store) == RUN
    begin(store)
    begin(store, **{"inputs.reward": vars(CORRECTED), "trainer.seed": 4})
    second = begin(store, **{"trainer.nnodes": 2})
    third = begin(store)
    assert (second.inputs_since, third.inputs_since) == (1, 1)
    assert (second.reason, third.reason, third.changes) == ("why", "", second.changes)
    now = description_now(store)
    assert (now.inputs.reward, now.inputs.prompts) == (CORRECTED, RUN.inputs.prompts)
    assert (now.setting("trainer.seed"), now.setting("trainer.nnodes")) == (4, 2)
    assert read_created(store) == RUN


@pytest.mark.parametrize("change", [{"trainer.seed.x": 4}, {"inputs.reward": "reward.py"}])
def test_a_broken_change_is_refused(store, change):
    with pytest.raises(ValueError, match=r"seed is 3|got `str`"):
        changed(RUN, change)
    begin(store, **change)
    with pytest.raises(CorruptObjectError, match="attempts/"):
        description_now(store)


def test_a_worker_of_an_earlier_attempt_is_refused(store):
    begin(store)
    refuse_superseded(store, 0)
    begin(store)
    with pytest.raises(SupersededError, match=r"attempts/001\.json"):
        refuse_superseded(store, 0)
    refuse_superseded(store, 1)


def test_shards_of_attempts_before_a_change_of_inputs_are_outdated(store):
    shards = [keys.rollout(0, number) for number in range(3)]
    for number, key in enumerate(shards):
        commit(store, key, {"maker": {ATTEMPT: number}}, "aa")
    for changes in ({}, {"trainer.nnodes": 2}):
        begin(store, **changes)
        assert outdated_shards(store, shards) == []
    begin(store, **{"inputs.reward": vars(CORRECTED)})
    begin(store)
    assert outdated_shards(store, shards) == shards[:2]


@pytest.mark.parametrize(
    ("key", "val_prompts", "functions"),
    [
        (keys.rollout(0, 1), False, False),
        (keys.validation(0, 1), True, False),
        (keys.manifest(0), False, False),
        (keys.policy(1), False, True),
    ],
)
def test_the_first_commit_that_depends_on_an_input_is_found(store, key, val_prompts, functions):
    """Only validations depend on validation prompts, and only trained policies on functions."""
    for other in (keys.plan(0), keys.policy(0)):
        store.create(other, b"{}")
    assert first_use(store, "prompts") is None
    store.create(key, b"{}")
    assert first_use(store, "prompts") == first_use(store, "model") == key
    assert (first_use(store, "val_prompts") == key) == val_prompts
    assert (first_use(store, "functions") == key) == functions
