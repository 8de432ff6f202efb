"""amendments/NNN.json: the step from which changes apply, and the amendments that are refused."""

import pytest

from pipeline.run import keys
from pipeline.run.amendments import (
    AmendedError,
    Amendment,
    description_at,
    description_now,
    find_description,
    read_amendments,
    refuse_amended,
    write_amendment,
)
from pipeline.run.commit import CorruptObjectError, DataFile, commit, read_commit
from pipeline.run.description import create_description
from pipeline.store import ObjectMissingError, open_store
from tests.unit.run.test_description import RUN

CORRECTED = DataFile("inputs/9/reward.py", 9, "9" * 64)
GOOD = {"number": 0, "reason": "why", "from_step": 0, "changes": {"trainer.seed": 4}}


@pytest.fixture
def store(tmp_path):
    """A run with two sealed steps."""
    store = open_store(str(tmp_path))
    create_description(store, RUN)
    for step in range(2):
        store.create(keys.manifest(step), b"{}")
    return store


def test_a_run_without_amendments_keeps_its_description(store):
    assert read_amendments(store) == []
    assert description_now(store) == description_at(store, 0) == find_description(store) == RUN


def test_a_missing_run_has_no_description(tmp_path):
    store = open_store(str(tmp_path))
    assert find_description(store) is None
    with pytest.raises(ObjectMissingError, match=r"run\.json"):
        description_now(store)


def test_each_amendment_applies_from_its_step(store):
    """The amendments change an input and settings. Earlier steps keep their description."""
    first = Amendment(0, "the reward file is corrected", 1, {"inputs.reward": CORRECTED})
    second = Amendment(1, "more nodes", 2, {"trainer.seed": 4, "trainer.nnodes": 2})
    assert write_amendment(store, first)
    assert write_amendment(store, second)
    assert read_amendments(store) == [first, second]
    assert description_at(store, 0) == RUN
    assert description_at(store, 1).inputs.reward == CORRECTED == first.files()[0]
    assert description_at(store, 1).settings == RUN.settings
    assert description_at(store, 2) == description_now(store)
    assert description_now(store).inputs.reward == CORRECTED
    assert description_now(store).setting("trainer.nnodes") == 2
    assert read_commit(store, "amendments/000.json")["changes"] == {
        "inputs.reward": vars(CORRECTED)
    }
    assert create_description(store, RUN) == RUN, "run.json itself does not change"


def test_inputs_of_several_kinds_can_be_amended(store):
    """Validation prompts and the reward function may be added or removed; the model may only be
    replaced."""
    model = {"config.json": CORRECTED, "model.safetensors": CORRECTED}
    changes = {"inputs.model": model, "inputs.val_prompts": CORRECTED, "inputs.reward": None}
    one = Amendment(0, "why", 0, changes)
    assert write_amendment(store, one)
    assert read_amendments(store) == [one]
    assert one.files() == [CORRECTED] * 3
    assert one.inputs == {"model", "val_prompts", "reward"}
    inputs = description_now(store).inputs
    assert (inputs.model, inputs.val_prompts, inputs.reward) == (model, CORRECTED, None)
    assert inputs.prompts == RUN.inputs.prompts


def test_only_one_of_two_simultaneous_amendments_is_written(store):
    """The other writer must check again, because its findings may no longer apply after the first
    amendment."""
    assert write_amendment(store, Amendment(0, "ours", 0, {"trainer.seed": 5}))
    assert not write_amendment(store, Amendment(0, "other", 0, {"trainer.seed": 4}))
    assert [one.reason for one in read_amendments(store)] == ["ours"]


def test_a_worker_that_missed_an_amendment_is_refused(store):
    refuse_amended(store, 0)
    assert write_amendment(store, Amendment(0, "why", 0, {"trainer.seed": 5}))
    with pytest.raises(AmendedError, match=r"amendments/000\.json in .*nothing more is committed"):
        refuse_amended(store, 0)
    refuse_amended(store, 1)


@pytest.mark.parametrize(
    ("from_step", "changes", "says"),
    [
        (3, {"trainer.seed": 4}, "from_step 3: step 2 is not sealed yet"),
        (0, {}, "reason or changes are empty"),
        (
            0,
            {"inputs.other": CORRECTED},
            "inputs.other: expected a setting or one of inputs.prompts",
        ),
        (0, {"inputs.prompts": None}, "inputs.prompts: null is not an object"),
        (0, {"inputs.model": {"config.json": 1}}, "inputs.model: config.json: 1 is not an object"),
        (0, {"inputs.reward": "reward.py"}, "inputs.reward: 'reward.py' is not an object"),
        (0, {"trainer.seed.x": 4}, "trainer.seed.x: seed is 3, not a group"),
    ],
)
def test_an_amendment_that_readers_refuse_is_not_written(store, from_step, changes, says):
    with pytest.raises(ValueError, match=says):
        write_amendment(store, Amendment(0, "why", from_step, changes))
    assert read_amendments(store) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"number": 1}, "number 1, expected 0"),
        ({"reason": ""}, "reason or changes are empty"),
        ({"from_step": -1}, "from_step: -1 is not a count"),
        ({"changes": None}, "changes: null is not an object"),
        ({"changes": {"inputs.reward": {"size": 1}}}, "inputs.reward: the field 'key' is missing"),
    ],
)
def test_a_broken_amendment_is_refused(store, change, says):
    commit(store, keys.amendment(0), {**GOOD, **change}, "a")
    with pytest.raises(CorruptObjectError, match=f"amendments/000.json in .*{says}"):
        description_now(store)


def test_an_amendment_from_an_earlier_step_than_the_previous_one_is_refused(store):
    write_amendment(store, Amendment(0, "why", 2, {"trainer.seed": 4}))
    commit(store, keys.amendment(1), {**GOOD, "number": 1, "from_step": 1}, "a")
    with pytest.raises(CorruptObjectError, match="from_step 1, expected at least 2, as in amend"):
        read_amendments(store)


@pytest.mark.parametrize("key", ["amendments/001.json", "amendments/other.json"])
def test_a_gap_between_amendments_is_refused(store, key):
    commit(store, key, {**GOOD, "number": 1}, "a")
    with pytest.raises(CorruptObjectError, match=f"000.json in .*no such object, but {key} exists"):
        description_now(store)


def test_an_amendment_that_does_not_match_its_digest_is_refused(store, tmp_path):
    write_amendment(store, Amendment(0, "why", 0, {"trainer.seed": 4}))
    path = tmp_path / keys.amendment(0)
    path.write_bytes(path.read_bytes().replace(b"why", b"who"))
    with pytest.raises(CorruptObjectError, match="its content has SHA-256"):
        description_now(store)
