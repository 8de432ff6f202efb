"""amendments/NNN.json: what holds from which step on, and which objects are refused."""

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

MENDED = DataFile("inputs/9/reward.py", 9, "9" * 64)
GOOD = {"number": 0, "reason": "why", "from_step": 0, "changes": {"trainer.seed": 4}}


@pytest.fixture
def store(tmp_path):
    """A run with two sealed steps."""
    store = open_store(str(tmp_path))
    create_description(store, RUN)
    for step in range(2):
        store.create(keys.manifest(step), b"{}")
    return store


def test_a_run_without_amendments_is_what_it_was_created_as(store):
    assert read_amendments(store) == []
    assert description_now(store) == description_at(store, 0) == find_description(store) == RUN


def test_without_a_run(tmp_path):
    store = open_store(str(tmp_path))
    assert find_description(store) is None
    with pytest.raises(ObjectMissingError, match=r"run\.json"):
        description_now(store)


def test_each_holds_from_its_step_on(store):
    """A mended input and a setting; what was made before them is described as it was."""
    first = Amendment(0, "the reward file is mended", 1, {"inputs.reward": MENDED})
    second = Amendment(1, "more nodes", 2, {"trainer.seed": 4, "trainer.nnodes": 2})
    assert write_amendment(store, first)
    assert write_amendment(store, second)
    assert read_amendments(store) == [first, second]
    assert description_at(store, 0) == RUN
    assert description_at(store, 1).inputs.reward == MENDED == first.files()[0]
    assert description_at(store, 1).settings == RUN.settings
    assert description_at(store, 2) == description_now(store)
    assert description_now(store).inputs.reward == MENDED
    assert description_now(store).setting("trainer.nnodes") == 2
    assert read_commit(store, "amendments/000.json")["changes"] == {"inputs.reward": vars(MENDED)}
    assert create_description(store, RUN) == RUN, "run.json itself stays as it was written"


def test_inputs_of_every_kind(store):
    """Validation prompts and the reward function may come or go; the model is all its files."""
    model = {"config.json": MENDED, "model.safetensors": MENDED}
    changes = {"inputs.model": model, "inputs.val_prompts": MENDED, "inputs.reward": None}
    one = Amendment(0, "why", 0, changes)
    assert write_amendment(store, one)
    assert read_amendments(store) == [one]
    assert one.files() == [MENDED] * 3
    assert one.inputs == {"model", "val_prompts", "reward"}
    inputs = description_now(store).inputs
    assert (inputs.model, inputs.val_prompts, inputs.reward) == (model, MENDED, None)
    assert inputs.prompts == RUN.inputs.prompts


def test_of_two_at_once_one_is_written(store):
    """The other must look again: what it found may not hold beside the first."""
    assert write_amendment(store, Amendment(0, "ours", 0, {"trainer.seed": 5}))
    assert not write_amendment(store, Amendment(0, "other", 0, {"trainer.seed": 4}))
    assert [one.reason for one in read_amendments(store)] == ["ours"]


def test_a_worker_that_does_not_know_of_it_is_refused(store):
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
        (0, {"inputs.other": MENDED}, "inputs.other: expected a setting or one of inputs.prompts"),
        (0, {"inputs.prompts": None}, "inputs.prompts: None is no object"),
        (0, {"inputs.model": {"config.json": 1}}, "inputs.model: config.json: 1 is no object"),
        (0, {"inputs.reward": "reward.py"}, "inputs.reward: 'reward.py' is no object"),
        (0, {"trainer.seed.x": 4}, "trainer.seed.x: seed is 3, not a group"),
    ],
)
def test_what_no_reader_takes_is_not_written(store, from_step, changes, says):
    with pytest.raises(ValueError, match=says):
        write_amendment(store, Amendment(0, "why", from_step, changes))
    assert read_amendments(store) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"number": 1}, "number 1, expected 0"),
        ({"reason": ""}, "reason or changes are empty"),
        ({"from_step": -1}, "from_step: -1 is no number"),
        ({"changes": None}, "changes: None is no object"),
        ({"changes": {"inputs.reward": {"size": 1}}}, "inputs.reward: it has no 'key'"),
    ],
)
def test_a_broken_amendment_is_refused(store, change, says):
    commit(store, keys.amendment(0), {**GOOD, **change}, "a")
    with pytest.raises(CorruptObjectError, match=f"amendments/000.json in .*{says}"):
        description_now(store)


def test_steps_do_not_go_backwards(store):
    write_amendment(store, Amendment(0, "why", 2, {"trainer.seed": 4}))
    commit(store, keys.amendment(1), {**GOOD, "number": 1, "from_step": 1}, "a")
    with pytest.raises(CorruptObjectError, match="from_step 1, expected at least 2, as in amend"):
        read_amendments(store)


@pytest.mark.parametrize("key", ["amendments/001.json", "amendments/other.json"])
def test_a_gap_is_refused(store, key):
    commit(store, key, {**GOOD, "number": 1}, "a")
    with pytest.raises(CorruptObjectError, match=f"000.json in .*no such object, but {key} is"):
        description_now(store)


def test_one_that_was_changed_is_refused(store, tmp_path):
    write_amendment(store, Amendment(0, "why", 0, {"trainer.seed": 4}))
    path = tmp_path / keys.amendment(0)
    path.write_bytes(path.read_bytes().replace(b"why", b"who"))
    with pytest.raises(CorruptObjectError, match="its content has SHA-256"):
        description_now(store)
