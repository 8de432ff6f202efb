"""Attempts of a run: the stored objects of an attempt, and the settings of its workers."""

import json
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path

import pytest

from pipeline.config.keys import setting_keys
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.run import keys
from pipeline.run import owner as owner_module
from pipeline.run.attempts import (
    Attempt,
    Claim,
    attempt_of,
    claimed,
    end_attempt,
    end_attempts,
    in_force,
    read_attempt,
    take_attempt,
    validations_of,
)
from pipeline.run.commit import CorruptObjectError, commit, read_commit
from pipeline.run.owner import Owner, owner_of, runs_here, signs_of_life, this_owner
from pipeline.store import StoreError, open_store
from tests.attempts import dead_owner, distant_owner, living_owner
from tests.patience import eventually


@pytest.fixture
def store(tmp_path: Path):
    return open_store(str(tmp_path))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs of life every few milliseconds."""
    monkeypatch.setattr(owner_module, "SIGN_S", 0.01)
    monkeypatch.setattr(owner_module, "_LOOK_EVERY_S", 0.05)


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


def test_each_attempt_has_its_own_number_and_stop_object(store):
    first = begin(store)
    end_attempt(store, first, "failed", "no expert left")
    second = begin(store, {"total_training_steps": 9})
    assert (first.number, second.number) == (0, 1)
    assert read_commit(store, keys.stop(0))["message"] == "no expert left"
    assert store.size(keys.stop(1)) is None
    assert read_commit(store, keys.attempt(1))["total_training_steps"] == 9
    assert read_commit(store, keys.attempt(1))["validations"] == [0, 9]
    assert read_attempt(store, 1) == second


def test_each_setting_is_stored_under_a_different_name():
    """The name is the last part of the setting's key."""
    attempt = attempt_of(config(), 0)
    derived = {field.name for field in fields(attempt)} - {"settings"}
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
        ({"validations": [0, "x"]}, "validations"),
        ({"save_freq": ...}, "'save_freq' is missing"),
        ({"save_freq": 0}, "invalid settings"),
        ({"owner": {"host": "a"}}, ""),
    ],
)
def test_a_broken_attempt_is_refused(store, change: dict, says: str):
    body = attempt_of(config(), 0).body() | change
    body = {name: value for name, value in body.items() if value is not ...}
    commit(store, keys.attempt(0), body, "a")
    with pytest.raises(CorruptObjectError, match=rf"attempts/000\.json.*{says}"):
        begin(store) if "owner" in change else in_force(config(), read_attempt(store, 0))


def begin(store, trainer: dict | None = None, owner: Owner | None = None) -> Attempt:
    return take_attempt(store, config(trainer), owner or dead_owner()).attempt


class TestAFlowRunThatComesBack:
    """A flow pod that died is replaced by a new pod of the same flow run."""

    def continued(self, store, flow_run: str, over: bool | None = False) -> Claim:
        return take_attempt(store, config(), distant_owner(flow_run), lambda other: over)

    def test_it_continues_its_attempt(self, store):
        first = self.continued(store, "mine")
        again = self.continued(store, "mine")
        assert (first.continued, again.continued) == (False, True)
        assert again.attempt == first.attempt
        assert store.size(keys.attempt(1)) is None

    def test_after_the_end_of_its_attempt_it_begins_a_new_one(self, store):
        end_attempt(store, self.continued(store, "mine").attempt, "failed", "no expert left")
        assert self.continued(store, "mine").attempt.number == 1

    def test_a_lost_attempt_does_not_stop_it(self, store):
        for owner in ("first", "second"):
            end_attempt(store, self.continued(store, owner).attempt, "failed", "no expert left")
        store.delete(keys.attempt(0))
        assert self.continued(store, "third").attempt.number == 2

    def test_another_flow_run_is_refused_while_the_first_may_come_back(self, store):
        self.continued(store, "mine")
        with pytest.raises(InputError, match=r"'x' is already running .* flow run mine"):
            self.continued(store, "other")

    def test_the_attempt_of_a_lost_flow_run_is_ended(self, store):
        self.continued(store, "mine")
        assert self.continued(store, "other", over=True).attempt.number == 1
        assert read_commit(store, keys.stop(0))["reason"] == "cancelled"

    def test_a_flow_run_of_another_server_counts_by_its_signs(self, store, impatient, monkeypatch):
        """Two clusters may share a store. Neither server knows the other's flow runs."""
        self.continued(store, "theirs", over=None)
        with signs_of_life(store, 0), pytest.raises(InputError, match="flow run theirs"):
            self.continued(store, "ours", over=None)
        monkeypatch.setattr(owner_module, "SILENT_S", 0.1)
        assert self.continued(store, "ours", over=None).attempt.number == 1

    def test_its_pod_may_end_without_ending_the_workers(self, store):
        with (
            pytest.raises(KeyboardInterrupt),
            claimed(store, config(), this_owner("mine"), lambda other: False),
        ):
            raise KeyboardInterrupt
        assert store.size(keys.stop(0)) is None
        assert self.continued(store, "mine").continued


class TestTheOwnerOfARun:
    """A run has one owner at a time, and a second start changes nothing."""

    def test_a_second_start_is_refused_and_writes_nothing(self, store):
        begin(store, owner=living_owner())
        before = {info.key: store.read(info.key) for info in store.list("")}
        owner = this_owner()
        with pytest.raises(InputError) as error:
            take_attempt(store, config(), owner)
        [problem] = error.value.problems
        assert f"process {os.getppid()} on {socket.gethostname()}" in problem
        assert f"retrace logs {config().run_uri} -f" in problem
        with pytest.raises(InputError):
            end_attempts(store, config(), owner)
        assert {info.key: store.read(info.key) for info in store.list("")} == before

    def test_after_kill_9_the_next_start_continues_at_once(self, store, monkeypatch):
        monkeypatch.setattr(owner_module.time, "sleep", lambda s: pytest.fail("it waits"))
        first = begin(store, owner=dead_owner())
        store.create(keys.sign(first.number, 7), b"")
        assert begin(store, owner=living_owner()).number == 1
        assert read_commit(store, keys.stop(0))["reason"] == "cancelled"
        assert list(store.list(keys.signs(0))) == []

    def test_a_real_process_is_alive_until_it_is_killed(self, store):
        program = (
            "import sys, time; from pipeline.run.owner import this_owner, owner_json; import json\n"
            "print(json.dumps(owner_json(this_owner())), flush=True); time.sleep(600)"
        )
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        try:
            owner = owner_of({"owner": json.loads(process.stdout.readline())})
            begin(store, owner=owner)
            with pytest.raises(InputError):
                begin(store)
            process.kill()  # and not waited for: a zombie is dead too
            eventually(lambda: runs_here(owner) is False, lambda: owner)
            assert begin(store).number == 1
        finally:
            process.kill()
            process.wait()

    def test_one_of_two_simultaneous_starts_wins(self, store, monkeypatch):
        """The other start begins after this one has looked for attempts, but before this one
        commits its attempt."""
        list_store = store.list

        def other_begins_meanwhile(prefix: str):
            found = list(list_store(prefix))
            monkeypatch.undo()
            begin(store, owner=living_owner())
            return found

        monkeypatch.setattr(store, "list", other_begins_meanwhile)
        with pytest.raises(InputError, match="is already running"):
            begin(store, owner=this_owner())
        assert store.size(keys.attempt(1)) is None

    def test_many_simultaneous_starts_have_one_winner(self, store):
        """Also if all of them end the attempt of a killed start first."""
        begin(store, owner=dead_owner())
        owners = [living_owner() for _ in range(16)]

        def start(owner: Owner) -> int | None:
            try:
                return begin(store, owner=owner).number
            except InputError:
                return None

        with ThreadPoolExecutor(16) as pool:
            won = list(pool.map(start, owners))
        assert sorted(map(str, won)) == ["1", *["None"] * 15]
        assert store.size(keys.attempt(2)) is None

    def test_an_owner_elsewhere_is_alive_while_it_gives_signs(self, store, impatient, monkeypatch):
        begin(store, owner=distant_owner())
        shown: list[str] = []
        with signs_of_life(store, 0), pytest.raises(InputError, match="on elsewhere"):
            take_attempt(store, config(), this_owner(), show=shown.append)
        assert "elsewhere" in shown[0]
        monkeypatch.setattr(owner_module, "SILENT_S", 0.1)
        assert begin(store).number == 1, "it was silent for SILENT_S"

    def test_another_thread_of_this_process_is_alive_too(self, store, impatient, monkeypatch):
        with claimed(store, config(), this_owner()), pytest.raises(InputError):
            begin(store, owner=this_owner())
        monkeypatch.setattr(owner_module, "SILENT_S", 0.1)
        assert begin(store, owner=this_owner()).number == 1

    def test_an_owner_that_ends_meanwhile_is_not_waited_for(self, store, monkeypatch):
        first = begin(store, owner=distant_owner())
        sleeps = iter([lambda: end_attempt(store, first, "finished", "")])
        monkeypatch.setattr(owner_module.time, "sleep", lambda s: next(sleeps)())
        assert begin(store).number == 1
        assert read_commit(store, keys.stop(0))["reason"] == "finished"

    def test_only_the_newest_sign_is_kept(self, store, impatient):
        store.create(keys.sign(0, 41), b"")  # by an earlier pod of the flow run
        with signs_of_life(store, 0):
            eventually(
                lambda: max(info.key for info in store.list(keys.signs(0))) > keys.sign(0, 44),
                lambda: list(store.list("")),
            )
            assert len(list(store.list(keys.signs(0)))) <= 2
        assert list(store.list(keys.signs(0))) == []

    def test_signs_continue_after_the_store_was_away(self, store, impatient, monkeypatch):
        """The response to a create may be lost, although the object was written."""
        create, lost = store.create, [0]

        def lossy(key: str, data: bytes) -> None:
            create(key, data)
            lost[0] += 1
            if lost[0] <= 2:
                raise StoreError("the connection was lost")

        monkeypatch.setattr(store, "create", lossy)
        with signs_of_life(store, 0):
            eventually(lambda: lost[0] > 4, lambda: lost)
            assert len(list(store.list(keys.signs(0)))) <= 2

    def test_an_owner_that_was_taken_for_dead_learns_of_it(self, store, impatient):
        with claimed(store, config(), this_owner()) as claim:
            assert not claim.is_lost()
            end_attempt(store, claim.attempt, "cancelled", "silent")
            eventually(claim.is_lost, lambda: list(store.list("")))

    @pytest.mark.parametrize("error", [InputError(["wrong"]), KeyboardInterrupt(), ValueError("x")])
    def test_an_error_ends_the_attempt(self, store, error):
        with pytest.raises(type(error)), claimed(store, config(), this_owner()):
            raise error
        expected = "failed" if isinstance(error, Exception) else "cancelled"
        assert read_commit(store, keys.stop(0))["reason"] == expected
        assert list(store.list(keys.signs(0))) == []
