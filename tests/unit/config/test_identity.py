"""Identity: what may change when a run is attached again, and what may not."""

from pipeline.config.identity import differing, identity
from pipeline.config.tree import RunConfig
from tests.unit.config.settings import ACTOR, load


def test_what_a_run_is(tmp_path):
    """Operational settings, the store's place and the paths of inputs are not identity."""
    keys = set(identity(load(tmp_path).config))
    assert {
        "trainer.seed",
        "trainer.nnodes",
        "trainer.experiment_name",
        f"{ACTOR}.megatron.tensor_model_parallel_size",
        f"{ACTOR}.router_replay.mode",
        f"{ACTOR}.router_replay.replay_file",
        "actor_rollout_ref.rollout.temperature",
        "custom_reward_function.name",
        "reward.on_error",
    } <= keys
    assert not keys & {
        "trainer.total_training_steps",
        "trainer.save_freq",
        "trainer.logger",
        "launch.rollout_workers",
        "launch.step_timeout_s",
        "store.uri",
        "data.train_files",
        "data.val_files",
        "actor_rollout_ref.model.path",
        "custom_reward_function.path",
    }


def test_differing(tmp_path):
    old = load(tmp_path, "trainer.seed=1", "trainer.save_freq=3").config
    new = load(tmp_path, "trainer.seed=2", "trainer.save_freq=4", f"{ACTOR}.optim.lr=1e-5").config
    assert differing(old, new) == {"trainer.seed": (1, 2), f"{ACTOR}.optim.lr": (1e-6, 1e-5)}
    assert differing(old, old) == {}


def test_survives_the_round_trip_through_json(tmp_path):
    """run.json holds the config; attaching compares it with the one just loaded."""
    config = load(tmp_path, "data.train_files=[a, b]", f"{ACTOR}.optim.lr=1e-7").config
    again = RunConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert differing(again, config) == {}
