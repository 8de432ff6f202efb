"""What one start of a run asks of its workers, and what it leaves in the store."""

from pathlib import Path

import pytest

from pipeline.config.errors import InputError
from pipeline.config.tree import RunConfig
from pipeline.flows.attempt import (
    attempt_of,
    begin_attempt,
    continue_attempt,
    end_attempt,
    validations_of,
)
from pipeline.store import keys, open_store
from pipeline.store.commit import read_commit


def config(trainer: dict | None = None, **sections: dict) -> RunConfig:
    settings = {
        "data": {"train_files": "t.parquet", "val_files": "v.parquet"},
        "actor_rollout_ref": {"model": {"path": "m"}},
        "trainer": {"experiment_name": "x", "total_training_steps": 7, **(trainer or {})},
        **sections,
    }
    return RunConfig.model_validate(settings)


@pytest.mark.parametrize(
    ("trainer", "versions"),
    [
        ({}, (0, 7)),
        ({"val_before_train": False}, (7,)),
        ({"test_freq": 3}, (0, 3, 6, 7)),
        ({"test_freq": 7}, (0, 7)),
    ],
)
def test_which_policies_are_validated(trainer, versions):
    assert validations_of(config(trainer)) == versions


def test_nothing_is_validated_without_files():
    assert validations_of(config(data={"train_files": "t.parquet"})) == ()


def test_workers_and_shards_default_to_one_and_to_none_with_a_replay_file():
    assert attempt_of(config(), 0).rollout_workers == 1
    assert attempt_of(config(launch={"rollout_workers": 3}), 0).rollout_shards == 3
    replay = {"mode": "R3", "replay_file": "set"}
    actor = {"model": {"path": "m"}, "actor": {"router_replay": replay}}
    assert attempt_of(config(actor_rollout_ref=actor), 0).rollout_workers == 0


def test_each_start_has_a_number_and_a_stop_object_of_its_own(tmp_path: Path):
    store = open_store(str(tmp_path))
    first = begin_attempt(store, config())
    end_attempt(store, first, "failed", "no expert left")
    second = begin_attempt(store, config({"total_training_steps": 9}))
    assert (first.number, second.number) == (0, 1)
    assert read_commit(store, keys.stop(0))["message"] == "no expert left"
    assert store.size(keys.stop(1)) is None
    assert read_commit(store, keys.attempt(1))["total_training_steps"] == 9
    assert read_commit(store, keys.attempt(1))["validations"] == [0, 9]


class TestAFlowRunThatComesBack:
    """A flow pod that died is replaced by another of the same flow run."""

    def continued(self, store, owner: str, over: bool = False):
        return continue_attempt(owner, lambda other: over, store, config())

    def test_it_goes_on_with_its_attempt(self, tmp_path: Path):
        store = open_store(str(tmp_path))
        first = self.continued(store, "mine")
        assert self.continued(store, "mine") == first
        assert store.size(keys.attempt(1)) is None

    def test_after_the_end_of_its_attempt_it_begins_another(self, tmp_path: Path):
        store = open_store(str(tmp_path))
        end_attempt(store, self.continued(store, "mine"), "failed", "no expert left")
        assert self.continued(store, "mine").number == 1

    def test_another_flow_run_is_refused_while_the_first_may_come_back(self, tmp_path: Path):
        store = open_store(str(tmp_path))
        self.continued(store, "mine")
        with pytest.raises(InputError, match="'x' is at work in flow run mine; wait for it"):
            self.continued(store, "other")

    def test_what_a_lost_flow_run_left_is_ended(self, tmp_path: Path):
        store = open_store(str(tmp_path))
        self.continued(store, "mine")
        assert self.continued(store, "other", over=True).number == 1
        assert read_commit(store, keys.stop(0))["reason"] == "cancelled"

    def test_of_two_that_begin_at_once_one_is_refused(self, tmp_path: Path, monkeypatch):
        """The other begins between this one's look and its commit."""
        store = open_store(str(tmp_path))
        list_store = store.list

        def other_begins_meanwhile(prefix: str):
            found = list(list_store(prefix))
            monkeypatch.undo()
            self.continued(store, "other")
            return found

        monkeypatch.setattr(store, "list", other_begins_meanwhile)
        with pytest.raises(InputError, match="is at work in flow run other"):
            self.continued(store, "mine")
        assert store.size(keys.attempt(1)) is None
