"""What one start of a run asks of its workers, and what it leaves in the store."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.config.keys import setting_keys
from pipeline.config.reading.load import load_config
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run.attempts import (
    attempt_of,
    begin_attempt,
    continue_attempt,
    end_attempt,
    in_force,
    read_attempt,
    validations_of,
)
from pipeline.run.commit import CorruptObjectError, commit, read_commit
from pipeline.store import open_store
from tests.paths import ROOT


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
    assert read_attempt(store, 1) == second


def test_what_is_stored(tmp_path: Path):
    """Keys and values of the quickstart's first attempt as an older commit stored them, and the
    settings that are newer.
    """
    stored = json.loads((ROOT / "tests/data/quickstart-0.1.0/attempts/000.json").read_bytes())
    store = open_store(str(tmp_path))
    begin_attempt(store, load_config(ROOT / "examples/quickstart.yaml", []).config)
    body = read_commit(store, keys.attempt(0))
    newer = {"device", "num_workers", "timeout_s", "trace_compression"}
    newer |= {"min_agreement", "on_unhealthy"}
    assert body.keys() == stored.keys() | newer
    random = {"attempt", "content_sha256"}
    assert {name: body[name] for name in body.keys() - random - newer} == {
        name: stored[name] for name in stored.keys() - random
    }


def test_each_setting_is_stored_under_a_name_of_its_own():
    """The last part of its key, as it always was."""
    attempt = attempt_of(config(), 0)
    newer = {"device", "num_workers", "timeout_s", "trace_compression"}
    newer |= {"min_agreement", "on_unhealthy"}
    derived = {"number", "rollout_workers", "rollout_shards", "training_ranks", "validations"}
    assert len(attempt.body()) == len(attempt.settings) + len(derived)
    assert all(key.operational for key in setting_keys() if key.for_workers)


def test_workers_go_by_the_settings_of_their_attempt():
    """Operational settings are the attempt's, whatever the run was created with; all others are
    the run's."""
    created = config({"seed": 3, "total_training_steps": 7, "logger": ["tensorboard"]})
    later = config(
        {"seed": 4, "total_training_steps": 9, "save_freq": 2, "test_freq": 3},
        launch={"step_timeout_s": 5.0},
    )
    found = in_force(created, attempt_of(later, 1))
    assert found.trainer.total_training_steps == 9
    assert found.trainer.save_freq == 2
    assert found.launch.step_timeout_s == 5.0
    assert found.trainer.seed == 3
    assert found.trainer.test_freq == created.trainer.test_freq, "its validations are derived"
    assert found.trainer.logger == ["tensorboard"]
    assert in_force(created, attempt_of(created, 0)) == created


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"rollout_workers": None}, "rollout_workers: None is no number"),
        ({"validations": [0, "x"]}, "validations: 'x' is no number"),
        ({"save_freq": ...}, "it has no 'save_freq'"),
        ({"training_ranks": ...}, "it has no 'training_ranks'"),
    ],
)
def test_a_broken_attempt_is_refused(tmp_path: Path, change: dict, says: str):
    store = open_store(str(tmp_path))
    body = attempt_of(config(), 0).body() | change
    body = {name: value for name, value in body.items() if value is not ...}
    commit(store, keys.attempt(0), body, "a")
    with pytest.raises(CorruptObjectError, match=f"attempts/000.json in .*{says}"):
        read_attempt(store, 0)


def test_settings_that_cannot_be_are_refused():
    attempt = attempt_of(config(), 0)
    wrong = replace(attempt, settings={**attempt.settings, "trainer.save_freq": 0})
    with pytest.raises(CorruptObjectError, match=r"attempts/000\.json: settings that cannot be"):
        in_force(config(), wrong)


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
