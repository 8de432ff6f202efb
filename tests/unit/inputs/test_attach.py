"""A start attaches to the run with the same name if settings and inputs match.

If they do not match, the error names all differences.
"""

import shutil
from pathlib import Path

from pipeline.run import keys
from pipeline.run.description import description_json
from pipeline.store import open_store
from tests.stored_runs import put_signed
from tests.unit.inputs.small_inputs import (
    REPLAY,
    load,
    prepare,
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
    less = {name: value for name, value in whole["config"].items() if name != "trainer"}
    for body, message in (
        ({**whole, "format": 2}, "format"),
        (
            {**whole, "config": less},
            "trainer: found ",
        ),
        ({**whole, "config": {**whole["config"], "new": 1}}, "new: found 1: Extra inputs are not"),
        ({"format": 1, "name": "test"}, "cannot be read: run.json"),
        ({"format": 1, "name": "test"}, "config"),
    ):
        put_signed(store, keys.run_json(), body)
        assert message in the_error(settings)
