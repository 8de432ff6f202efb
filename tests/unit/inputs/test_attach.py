"""The same name again attaches only to the same run; what differs is named."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline.config.keys import all_keys
from pipeline.config.section import formerly
from pipeline.inputs.stage import prepare, stage
from pipeline.run import keys
from pipeline.run.description import description_json, read_created
from pipeline.run.run_config import config_of
from pipeline.store import open_store
from tests.paths import ROOT
from tests.unit.inputs.small_inputs import (
    REPLAY,
    check,
    load,
    the_error,
    use,
    verl_rows,
    write_prompts,
)


def test_another_run_of_the_same_name(settings):
    """Every differing key with both values, and the ways out."""
    prepare(load(settings))
    problem = the_error(
        settings, "trainer.seed=2", "actor_rollout_ref.actor.optim.lr=0.5",
        f"{REPLAY}.mode=R2", "trainer.total_training_steps=9",
    )  # fmt: skip
    uri = open_store(f"{settings.parent}/store/test").uri
    assert problem == (
        f"trainer.experiment_name: the run 'test' in {uri} was made with other settings or "
        "inputs:\n"
        "  actor_rollout_ref.actor.optim.lr: it has 1e-06, now 0.5\n"
        "  actor_rollout_ref.actor.router_replay.mode: it has 'disabled', now 'R2'\n"
        "  trainer.seed: it has 1, now 2\n"
        "go back to the old values, or go on with the new ones in a new run, from the beginning: "
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
    assert "data.train_files: it has 10 prompts, now 9, with other content" in problem
    assert "data.val_files: it has none, now prompts" in problem
    assert "custom_reward_function.path: it has SHA-256" in problem
    assert "actor_rollout_ref.model.path: model.safetensors: it has SHA-256" in problem


def test_broken_or_newer_run_json(settings):
    run = prepare(load(settings))
    store, whole = run.store, description_json(run.description)
    less = {name: value for name, value in whole["config"].items() if name != "algorithm"}
    for body, message in (
        ({"format": 2}, "format 2, expected 1"),
        ({**whole, "config": less}, "algorithm.adv_estimator: found no value, and what"),
        ({**whole, "config": {**whole["config"], "new": 1}}, "new: found 1: Extra inputs are not"),
        ({"format": 1, "name": "test"}, "cannot be read: run.json"),
        ({"format": 1, "name": "test"}, "it has no 'config'"),
    ):
        store.delete(keys.run_json())
        store.create(keys.run_json(), json.dumps(body).encode())
        assert message in the_error(settings)


@pytest.fixture
def old_run(tmp_path, monkeypatch):
    """The quickstart as an older commit left it, in a store of its own: overrides that name it."""
    monkeypatch.chdir(ROOT)
    shutil.copytree(ROOT / "tests/data/quickstart-0.1.0", tmp_path / "store/quickstart")
    return (
        f"store.uri={tmp_path}/store",
        f"trainer.default_local_dir={tmp_path}",
        # The example of that commit; today's has another learning rate.
        "actor_rollout_ref.actor.optim.lr=5e-4",
    )


def test_a_run_of_an_older_commit_is_attached_to(old_run):
    """Its run.json stays as it is; later settings have the values that it was made with."""
    settings = ROOT / "examples/quickstart.yaml"
    inputs = check(settings, *old_run)
    before = {info.key: inputs.store.read(info.key) for info in inputs.store.list("")}
    run = stage(inputs)
    assert run.description == read_created(inputs.store)
    assert config_of(run.description).trainer.total_training_steps == 8
    after = {info.key: inputs.store.read(info.key) for info in inputs.store.list("")}
    assert after.keys() - before.keys() == {keys.policy(0)}
    assert {key: after[key] for key in before} == before


def test_a_setting_newer_than_the_run_keeps_what_the_run_did(old_run, tmp_path, monkeypatch):
    """As if max_staleness had come after the run, which was made without any overlap."""
    name = "trainer.max_staleness"
    marked = all_keys()[name].field
    monkeypatch.setattr(marked, "json_schema_extra", formerly(1))
    path = tmp_path / "store/quickstart/run.json"
    body = json.loads(path.read_text())
    del body["config"]["trainer"]["max_staleness"], body["content_sha256"]
    path.write_text(json.dumps(body))

    settings = ROOT / "examples/quickstart.yaml"
    inputs = check(settings, *old_run)
    assert inputs.config.trainer.max_staleness == 1
    note = "trainer.max_staleness: 1, as before this setting existed: the run is older"
    assert note in inputs.notes
    assert config_of(stage(inputs).description).trainer.max_staleness == 1
    problem = the_error(settings, *old_run, f"{name}=0")
    assert problem.splitlines()[1:-1] == [f"  {name}: it has 1, now 0"]


def test_a_run_of_an_older_commit_refuses_other_settings(old_run):
    settings = ROOT / "examples/quickstart.yaml"
    problem = the_error(settings, *old_run, "trainer.seed=2", "trainer.save_freq=3")
    assert problem.splitlines()[1:-1] == ["  trainer.seed: it has 1, now 2"]
