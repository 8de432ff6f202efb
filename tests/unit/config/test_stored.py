"""New settings and new defaults never change an existing run."""

import copy
import json

import pytest
from pydantic import Field

from pipeline.config import keys, stored
from pipeline.config.identity import differing
from pipeline.config.section import FOR_WORKERS, Section, formerly
from pipeline.config.stored import read_stored, with_former_values
from pipeline.config.tree import RunConfig, Trainer
from pipeline.errors import InputError
from tests.paths import ROOT

OLD = json.loads((ROOT / "tests/data/quickstart-0.1.0/run.json").read_text())["config"]


class Curriculum(Section):
    start: int = Field(7, json_schema_extra=formerly(0))
    names: list[str] = Field(["a"], json_schema_extra=formerly([]))


class GrownTrainer(Trainer):
    grown: int = Field(5, json_schema_extra=formerly(3))
    patience: int = Field(5, json_schema_extra=FOR_WORKERS | formerly(2))
    curriculum: Curriculum = Field(default_factory=Curriculum)
    other: Curriculum | None = Field(None, json_schema_extra=formerly(None))


class Grown(RunConfig):
    trainer: GrownTrainer


class Unmarked(RunConfig):
    novelty: int = 5


@pytest.fixture
def tree(monkeypatch):
    """Return a function that replaces the current settings tree with a different one."""

    def put(other: type[RunConfig]) -> None:
        for module in (keys, stored):
            monkeypatch.setattr(module, "RunConfig", other)
        keys.all_keys.cache_clear()

    yield put
    keys.all_keys.cache_clear()


def test_every_setting_is_in_the_old_run_or_is_marked():
    """A new setting must be marked with `formerly`, which gives the setting's value in older
    runs."""
    found = keys.all_keys().values()

    def decided(key: keys.Key) -> bool:
        value = OLD
        for part in key.name.split("."):
            if value is None:
                return True
            if part not in value:
                return key.is_new
            value = value[part]
        return True

    undecided = [key.name for key in found if key.section is None and not decided(key)]
    assert undecided == [], "give these json_schema_extra=formerly(VALUE)"


def test_an_old_run_is_read_unchanged():
    before = copy.deepcopy(OLD)
    config = read_stored(OLD, "run.json")
    assert before == OLD
    for key in keys.setting_keys():
        expected = OLD
        for part in key.name.split("."):
            if part not in expected:
                expected = key.former
                break
            expected = expected[part]
        assert keys.value_at(config, key.name) == expected, key.name


def test_a_new_setting_has_its_former_value_in_old_runs(tree):
    tree(Grown)
    old = read_stored(OLD, "run.json")
    assert (old.trainer.grown, old.trainer.patience) == (3, 2)
    assert old.trainer.curriculum == Curriculum(start=0, names=[])
    assert old.trainer.other is None
    assert old.trainer.seed == OLD["trainer"]["seed"]


def test_attaching_compares_with_the_former_values(tree):
    """Today's defaults differ from the former values. Operational settings are not compared."""
    tree(Grown)
    new = Grown.model_validate(OLD)
    assert differing(read_stored(OLD, "run.json"), new) == {
        "trainer.grown": (3, 5),
        "trainer.curriculum.start": (0, 7),
        "trainer.curriculum.names": ([], ["a"]),
        "actor_rollout_ref.actor.optim.weight_decay_on_norms": (True, False),
        "actor_rollout_ref.actor.optim.skip_nonfinite": (False, True),
        "actor_rollout_ref.actor.megatron.use_remove_padding": (False, True),
        "algorithm.rollout_correction.uncorrected_staleness": (True, False),
    }


def test_settings_that_the_user_did_not_set_have_the_old_runs_values(tree):
    """Attaching with the same file continues the run unchanged. A value that the file sets is
    kept."""
    tree(Grown)
    unwritten = copy.deepcopy(OLD)
    config, taken = with_former_values(Grown.model_validate(unwritten), OLD)
    expected = {
        "trainer.grown": 3,
        "trainer.curriculum.start": 0,
        "trainer.curriculum.names": [],
        "actor_rollout_ref.actor.optim.weight_decay_on_norms": True,
        "actor_rollout_ref.actor.optim.skip_nonfinite": False,
        "actor_rollout_ref.actor.megatron.use_remove_padding": False,
        "algorithm.rollout_correction.uncorrected_staleness": True,
    }
    assert taken == expected
    assert differing(read_stored(OLD, "run.json"), config) == {}
    assert config.trainer.patience == 5  # operational: today's default

    written = copy.deepcopy(OLD)
    written["trainer"] |= {"grown": 5, "curriculum": {"start": 1}}
    config, taken = with_former_values(Grown.model_validate(written), OLD)
    assert taken == {
        "trainer.curriculum.names": [],
        "actor_rollout_ref.actor.optim.weight_decay_on_norms": True,
        "actor_rollout_ref.actor.optim.skip_nonfinite": False,
        "actor_rollout_ref.actor.megatron.use_remove_padding": False,
        "algorithm.rollout_correction.uncorrected_staleness": True,
    }
    assert set(differing(read_stored(OLD, "run.json"), config)) == {
        "trainer.grown",
        "trainer.curriculum.start",
    }


def test_a_run_as_new_as_the_settings_keeps_its_values(tree):
    """The run's stored settings contain all defaults, so no value has to be adapted."""
    tree(Grown)
    today = Grown.model_validate(OLD)
    assert with_former_values(today, today.model_dump(mode="json")) == (today, {})


def test_a_stored_value_is_kept(tree):
    tree(Grown)
    settings = copy.deepcopy(OLD)
    settings["trainer"] |= {"grown": 8, "other": {"start": 1, "names": []}}
    config = read_stored(settings, "run.json")
    assert config.trainer.grown == 8
    assert config.trainer.other == Curriculum(start=1, names=[])


def test_a_setting_without_a_known_former_value_is_refused(tree):
    tree(Unmarked)
    with pytest.raises(InputError) as caught:
        read_stored(OLD, "run.json")
    assert caught.value.problems == (
        "run.json: novelty: found no value, and the value that applies to runs older than this "
        "setting is unknown; use the version of retrace that created the run",
    )


def test_all_problems_are_reported_together():
    settings = copy.deepcopy(OLD)
    del settings["trainer"]["seed"], settings["data"]["shuffle"]
    with pytest.raises(InputError) as caught:
        read_stored(settings, "run.json")
    assert [problem.split(": ")[1] for problem in caught.value.problems] == [
        "data.shuffle",
        "trainer.seed",
    ]
    settings = {**OLD, "gone": 1, "reward": {"on_error": "ignore"}}
    with pytest.raises(InputError) as caught:
        read_stored(settings, "run.json")
    assert [problem.split(": ")[1] for problem in caught.value.problems] == [
        "reward.on_error",
        "gone",
    ]


def test_a_changed_default_changes_no_existing_run():
    """A run whose file sets no value keeps the default that applied when the run was created."""
    unwritten = copy.deepcopy(OLD)
    del unwritten["actor_rollout_ref"]["rollout"]["enforce_eager"]
    config, taken = with_former_values(RunConfig.model_validate(unwritten), OLD)
    assert taken["actor_rollout_ref.rollout.enforce_eager"] is True
    assert differing(read_stored(OLD, "run.json"), config) == {}
