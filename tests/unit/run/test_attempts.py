"""Attempts of a run: the stored objects of an attempt, and the settings of its workers."""

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
def test_the_settings_select_the_policies_to_validate(trainer, versions):
    assert validations_of(config(trainer)) == versions


def test_nothing_is_validated_without_validation_files():
    assert validations_of(config(data={"train_files": "t.parquet"})) == ()


def test_there_is_one_worker_by_default_but_none_with_a_replay_file():
    assert attempt_of(config(), 0).rollout_workers == 1
    assert attempt_of(config(launch={"rollout_workers": 3}), 0).rollout_shards == 3
    replay = {"mode": "R3", "replay_file": "set"}
    actor = {"model": {"path": "m"}, "actor": {"router_replay": replay}}
    assert attempt_of(config(actor_rollout_ref=actor), 0).rollout_workers == 0


def test_each_attempt_has_its_own_number_and_stop_object(tmp_path: Path):
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


def test_the_stored_form_is_that_of_an_older_run_and_has_newer_settings(tmp_path: Path):
    """The older run is the quickstart of version 0.1.0. The settings that later versions added are
    stored too."""
    stored = json.loads((ROOT / "tests/data/quickstart-0.1.0/attempts/000.json").read_bytes())
    store = open_store(str(tmp_path))
    begin_attempt(store, load_config(ROOT / "examples/quickstart.yaml", []).config)
    body = read_commit(store, keys.attempt(0))
    newer = {"device", "num_workers", "policy_cache", "timeout_s", "trace_compression"}
    newer |= {"min_agreement", "on_unhealthy", "policy_buffer_mib", "enable", "every"}
    assert body.keys() == stored.keys() | newer
    random = {"attempt", "content_sha256"}
    assert {name: body[name] for name in body.keys() - random - newer} == {
        name: stored[name] for name in stored.keys() - random
    }


def test_each_setting_is_stored_under_a_different_name():
    """The name is the last part of the setting's key."""
    attempt = attempt_of(config(), 0)
    newer = {"device", "num_workers", "policy_cache", "timeout_s", "trace_compression"}
    newer |= {"min_agreement", "on_unhealthy", "policy_buffer_mib", "enable", "every"}
    derived = {"number", "rollout_workers", "rollout_shards", "training_ranks", "validations"}
    assert len(attempt.body()) == len(attempt.settings) + len(derived)
    assert all(key.operational for key in setting_keys() if key.for_workers)


def test_workers_use_the_settings_of_their_attempt():
    """Operational settings come from the attempt, even if the run was created with different ones.
    All other settings come from the run."""
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
        ({"rollout_workers": None}, "rollout_workers: null is not a count"),
        ({"validations": [0, "x"]}, "validations: 'x' is not a count"),
        ({"save_freq": ...}, "the field 'save_freq' is missing"),
        ({"training_ranks": ...}, "the field 'training_ranks' is missing"),
    ],
)
def test_a_broken_attempt_is_refused(tmp_path: Path, change: dict, says: str):
    store = open_store(str(tmp_path))
    body = attempt_of(config(), 0).body() | change
    body = {name: value for name, value in body.items() if value is not ...}
    commit(store, keys.attempt(0), body, "a")
    with pytest.raises(CorruptObjectError, match=f"attempts/000.json in .*{says}"):
        read_attempt(store, 0)


def test_an_attempt_with_invalid_settings_is_refused():
    attempt = attempt_of(config(), 0)
    wrong = replace(attempt, settings={**attempt.settings, "trainer.save_freq": 0})
    with pytest.raises(CorruptObjectError, match=r"attempts/000\.json: invalid settings"):
        in_force(config(), wrong)


class TestAFlowRunThatComesBack:
    """A flow pod that died is replaced by a new pod of the same flow run."""

    def continued(self, store, owner: str, over: bool = False):
        return continue_attempt(owner, lambda other: over, store, config())

    def test_it_continues_its_attempt(self, tmp_path: Path):
        store = open_store(str(tmp_path))
        first = self.continued(store, "mine")
        assert self.continued(store, "mine") == first
        assert store.size(keys.attempt(1)) is None

    def test_after_the_end_of_its_attempt_it_begins_a_new_one(self, tmp_path: Path):
        store = open_store(str(tmp_path))
        end_attempt(store, self.continued(store, "mine"), "failed", "no expert left")
        assert self.continued(store, "mine").number == 1

    def test_a_lost_attempt_does_not_stop_it(self, tmp_path: Path):
        store = open_store(str(tmp_path))
        for owner in ("first", "second"):
            end_attempt(store, self.continued(store, owner), "failed", "no expert left")
        store.delete(keys.attempt(0))
        assert self.continued(store, "third").number == 2

    def test_another_flow_run_is_refused_while_the_first_may_come_back(self, tmp_path: Path):
        store = open_store(str(tmp_path))
        self.continued(store, "mine")
        with pytest.raises(InputError, match="'x' is in progress in flow run mine; wait for"):
            self.continued(store, "other")

    def test_the_attempt_of_a_lost_flow_run_is_ended(self, tmp_path: Path):
        store = open_store(str(tmp_path))
        self.continued(store, "mine")
        assert self.continued(store, "other", over=True).number == 1
        assert read_commit(store, keys.stop(0))["reason"] == "cancelled"

    def test_one_of_two_simultaneous_flow_runs_is_refused(self, tmp_path: Path, monkeypatch):
        """The other flow run begins after this one has looked for attempts, but before this one
        commits its attempt."""
        store = open_store(str(tmp_path))
        list_store = store.list

        def other_begins_meanwhile(prefix: str):
            found = list(list_store(prefix))
            monkeypatch.undo()
            self.continued(store, "other")
            return found

        monkeypatch.setattr(store, "list", other_begins_meanwhile)
        with pytest.raises(InputError, match="is in progress in flow run other"):
            self.continued(store, "mine")
        assert store.size(keys.attempt(1)) is None
