"""A start attaches to the run with the same name if settings and inputs match.

If they do not match, the error names all differences.
"""

import json
import shutil
from pathlib import Path

import pytest

from pipeline.config.keys import all_keys
from pipeline.config.section import formerly
from pipeline.inputs.stage import prepare, stage
from pipeline.run import keys
from pipeline.run.attempts import config_of
from pipeline.run.description import description_json, read_created
from pipeline.store import open_store
from tests.forged_sets import put_signed
from tests.paths import ROOT
from tests.stored_runs import rewrite
from tests.unit.inputs.small_inputs import (
    REPLAY,
    check,
    load,
    the_error,
    use,
    verl_rows,
    write_prompts,
)


def test_a_different_run_with_the_same_name_is_refused(settings):
    """The refusal names each differing key with both values, and the ways to continue."""
    prepare(load(settings))
    problem = the_error(
        settings, "trainer.seed=2", "actor_rollout_ref.actor.optim.lr=0.5",
        f"{REPLAY}.mode=R2", "trainer.total_training_steps=9",
    )  # fmt: skip
    uri = open_store(f"{settings.parent}/store/test").uri
    assert problem == (
        f"trainer.experiment_name: the run 'test' in {uri} has different settings or inputs:\n"
        "  actor_rollout_ref.actor.optim.lr: was 1e-06, now 0.5\n"
        "  actor_rollout_ref.actor.router_replay.mode: was 'disabled', now 'R2'\n"
        "  trainer.seed: was 1, now 2\n"
        "restore the old values, or continue with the new ones in a new run, from the beginning: "
        "add trainer.experiment_name=test-2"
    )


def test_paths_may_change_but_not_contents(settings, model):
    """Inputs are compared by content."""
    prepare(load(settings))
    elsewhere = settings.parent / "elsewhere"
    elsewhere.mkdir()
    copies = [shutil.copy(settings.parent / name, elsewhere) for name in
              ("train.parquet", "reward.py")]  # fmt: skip
    shutil.copytree(model, elsewhere / "model")
    moved = (
        f"data.train_files={copies[0]}",
        f"custom_reward_function.path={copies[1]}",
        f"actor_rollout_ref.model.path={elsewhere}/model",
    )
    store = prepare(load(settings, *moved)).store
    use(store)
    use(store, keys.validation(0, 0))

    Path(copies[1]).write_text(Path(copies[1]).read_text() + "# changed\n")
    write_prompts(Path(copies[0]), verl_rows(9))
    weights = elsewhere / "model/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    problem = the_error(settings, *moved, f"data.val_files={copies[0]}")
    assert "data.train_files: had 10 prompts, now 9, with different content" in problem
    assert "data.val_files: had none, now prompts" in problem
    assert "custom_reward_function.path: was SHA-256" in problem
    assert "actor_rollout_ref.model.path: model.safetensors: was SHA-256" in problem


def test_a_broken_or_newer_run_json_is_refused(settings):
    run = prepare(load(settings))
    store, whole = run.store, description_json(run.description)
    less = {name: value for name, value in whole["config"].items() if name != "algorithm"}
    for body, message in (
        ({"format": 2}, "format 2, expected 1"),
        (
            {**whole, "config": less},
            "algorithm.adv_estimator: found no value, and the value that applies",
        ),
        ({**whole, "config": {**whole["config"], "new": 1}}, "new: found 1: Extra inputs are not"),
        ({"format": 1, "name": "test"}, "cannot be read: run.json"),
        ({"format": 1, "name": "test"}, "the field 'config' is missing"),
    ):
        put_signed(store, keys.run_json(), body)
        assert message in the_error(settings)


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """The overrides that select a copy of a quickstart run created by an older commit."""
    monkeypatch.chdir(ROOT)
    run = shutil.copytree(ROOT / "tests/data/quickstart-0.1.0", tmp_path / "store/quickstart")
    (reward,) = run.glob("inputs/*/reward.py")
    return (
        f"store.uri={tmp_path}/store",
        f"trainer.default_local_dir={tmp_path}",
        # That commit's example has a different learning rate and a different reward file.
        "actor_rollout_ref.actor.optim.lr=5e-4",
        f"custom_reward_function.path={reward}",
    )


def test_a_start_attaches_to_a_run_of_an_older_commit(old_run):
    """`run.json` stays unchanged; settings that are newer than the run get their former values."""
    settings = ROOT / "examples/quickstart.yaml"
    inputs = check(settings, *old_run)
    before = {info.key: inputs.store.read(info.key) for info in inputs.store.list("")}
    run = stage(inputs)
    assert run.description == read_created(inputs.store)
    assert config_of(run.description).trainer.total_training_steps == 8
    after = {info.key: inputs.store.read(info.key) for info in inputs.store.list("")}
    assert after.keys() - before.keys() == {keys.policy(0)}
    assert {key: after[key] for key in before} == before


def test_a_setting_newer_than_the_run_keeps_the_behaviour_of_the_run(
    old_run, tmp_path, monkeypatch
):
    """The test marks max_staleness as newer than the run, with a former value of 1."""
    name = "trainer.max_staleness"
    marked = all_keys()[name].field
    monkeypatch.setattr(marked, "json_schema_extra", formerly(1))
    path = tmp_path / "store/quickstart/run.json"
    config = json.loads(path.read_text())["config"]
    del config["trainer"]["max_staleness"]
    rewrite(path, {"config": config})

    settings = ROOT / "examples/quickstart.yaml"
    inputs = check(settings, *old_run)
    assert inputs.config.trainer.max_staleness == 1
    note = "trainer.max_staleness: 1, because the run is older than this setting"
    assert note in inputs.notes
    assert config_of(stage(inputs).description).trainer.max_staleness == 1
    problem = the_error(settings, *old_run, f"{name}=0")
    assert problem.splitlines()[1:-1] == [f"  {name}: was 1, now 0"]


def test_a_run_of_an_older_commit_refuses_different_settings(old_run):
    settings = ROOT / "examples/quickstart.yaml"
    problem = the_error(settings, *old_run, "trainer.seed=2", "trainer.save_freq=3")
    assert problem.splitlines()[1:-1] == ["  trainer.seed: was 1, now 2"]
