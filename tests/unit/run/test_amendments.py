"""amendments/NNN.json: what holds from which step on, and which objects are refused."""

import pytest

from pipeline.run import keys
from pipeline.run.amendments import (
    Amendment,
    description_at,
    description_now,
    find_description,
    read_amendments,
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
    first = write_amendment(store, "the reward file is mended", 1, {"inputs.reward": MENDED})
    second = write_amendment(store, "more nodes", 2, {"trainer.seed": 4, "trainer.nnodes": 2})
    assert read_amendments(store) == [first, second]
    assert second == Amendment(1, "more nodes", 2, {"trainer.seed": 4, "trainer.nnodes": 2})
    assert description_at(store, 0) == RUN
    assert description_at(store, 1).inputs.reward == MENDED == first.files()[0]
    assert description_at(store, 1).settings == RUN.settings
    assert description_at(store, 2) == description_now(store)
    assert description_now(store).inputs.reward == MENDED
    assert description_now(store).setting("trainer.nnodes") == 2
    assert read_commit(store, "amendments/000.json")["changes"] == {"inputs.reward": vars(MENDED)}
    assert create_description(store, RUN) == RUN, "run.json itself stays as it was written"


def test_of_two_at_once_one_is_the_next(store, monkeypatch):
    """The other is written between this one's look and its commit."""
    list_store = store.list

    def other_writes_meanwhile(prefix: str):
        found = list(list_store(prefix))
        monkeypatch.undo()
        write_amendment(store, "other", 0, {"trainer.seed": 4})
        return found

    monkeypatch.setattr(store, "list", other_writes_meanwhile)
    assert write_amendment(store, "ours", 0, {"trainer.seed": 5}).number == 1
    assert [one.reason for one in read_amendments(store)] == ["other", "ours"]


@pytest.mark.parametrize(
    ("from_step", "changes", "says"),
    [
        (3, {"trainer.seed": 4}, "from_step 3: step 2 is not sealed yet"),
        (0, {}, "reason or changes are empty"),
        (0, {"inputs.model": MENDED}, "inputs.model: expected a setting or one of inputs.prompts"),
        (0, {"inputs.reward": "reward.py"}, "inputs.reward: 'reward.py' is no object"),
        (0, {"trainer.seed.x": 4}, "trainer.seed.x: seed is 3, not a group"),
    ],
)
def test_what_no_reader_takes_is_not_written(store, from_step, changes, says):
    with pytest.raises(ValueError, match=says):
        write_amendment(store, "why", from_step, changes)
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
    write_amendment(store, "why", 2, {"trainer.seed": 4})
    commit(store, keys.amendment(1), {**GOOD, "number": 1, "from_step": 1}, "a")
    with pytest.raises(CorruptObjectError, match="from_step 1, expected at least 2, as in amend"):
        read_amendments(store)


@pytest.mark.parametrize("key", ["amendments/001.json", "amendments/other.json"])
def test_a_gap_is_refused(store, key):
    commit(store, key, {**GOOD, "number": 1}, "a")
    with pytest.raises(CorruptObjectError, match=f"000.json in .*no such object, but {key} is"):
        description_now(store)


def test_one_that_was_changed_is_refused(store, tmp_path):
    write_amendment(store, "why", 0, {"trainer.seed": 4})
    path = tmp_path / keys.amendment(0)
    path.write_bytes(path.read_bytes().replace(b"why", b"who"))
    with pytest.raises(CorruptObjectError, match="its content has SHA-256"):
        description_now(store)
