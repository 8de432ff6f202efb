"""Staging: inputs are put into the store once, and an interrupted start is completed."""

import pytest

from pipeline.config.keys import with_value
from pipeline.errors import InputError
from pipeline.inputs.stage import stage
from pipeline.policies.fetch import fetch_policy
from pipeline.run import keys
from pipeline.run.commit import DataFile, read_commit, read_data
from pipeline.run.description import parse_description
from pipeline.store import open_store
from pipeline.traces import Geometry
from tests.unit.inputs.small_inputs import change_of, check, load, prepare


def test_run_json_describes_the_run(settings):
    """run.json contains the resolved settings, the digest of every input, and the geometry."""
    config = load(settings)
    run = prepare(config)
    body = read_commit(run.store, keys.run_json())
    assert parse_description(body, run.uri) == run.description
    assert body["format"] == 1
    resolved = with_value(config, "actor_rollout_ref.actor.optim.lr_decay_steps", 2)
    assert body["config"] == resolved.model_dump(mode="json")
    assert body["geometry"] == {"experts": 16, "topk": 4, "layers": [1, 2, 3]}
    assert run.geometry == Geometry(16, 4, (1, 2, 3))
    assert {"retrace", "python", "transformers"} <= set(body["versions"])
    assert (run.name, run.prompt_count, run.val_prompt_count) == ("test", 10, 0)
    assert run.uri == open_store(f"{settings.parent}/store/test").uri
    assert body["inputs"]["val_prompts"] is None
    reward = read_data(run.store, DataFile(**body["inputs"]["reward"]))
    assert reward == (settings.parent / "reward.py").read_bytes()


def test_policy_0_is_the_staged_model(settings, model, tmp_path):
    """Policy 0 refers to the staged files. Code in a model's folder is never staged."""
    run = prepare(load(settings))
    fetch_policy(run.store, 0, tmp_path / "policy")
    files = {path.name: path.read_bytes() for path in (tmp_path / "policy").iterdir()}
    assert files == {path.name: path.read_bytes() for path in model.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(files)


def test_staging_again_changes_nothing(settings):
    run = prepare(load(settings))
    before = {info.key: run.store.read(info.key) for info in run.store.list("")}
    again = stage(check(settings, "trainer.total_training_steps=7", "launch.rollout_workers=2"))
    assert again.description == run.description
    assert {info.key: run.store.read(info.key) for info in run.store.list("")} == before


def test_two_flows_at_the_same_time_create_one_run(settings):
    """Both flows finish their checks before either creates the run."""
    inputs, same = check(settings), check(settings)
    other = check(settings, "trainer.seed=5")
    first = stage(inputs)
    assert stage(same).description == first.description
    with pytest.raises(InputError, match=r"trainer\.seed: was 1, now 5"):
        stage(other)


def test_interrupted_staging_is_completed(settings):
    """If a start is killed between two objects, the next start creates the missing ones."""
    run = prepare(load(settings))
    run.store.delete(keys.policy(0))
    run.store.delete(keys.run_json())
    run.store.delete(run.description.inputs.reward.key)
    assert prepare(load(settings)).description.inputs == run.description.inputs


def test_inputs_that_were_swept_are_staged_again(settings):
    run = prepare(load(settings))
    (settings.parent / "reward.py").write_text("def compute_score(**_):\n    return 2.0\n")
    again = prepare(load(settings))
    assert change_of(again) is not None
    for file in again.description.inputs.files():
        run.store.delete(file.key)
    for file in prepare(load(settings)).description.inputs.files():
        read_data(run.store, file)
