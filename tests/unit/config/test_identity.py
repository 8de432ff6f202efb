"""A run's identity consists of the settings that may not change when the run is attached again."""

from pipeline.config.identity import differing, identity
from pipeline.config.tree import RunConfig
from tests.unit.config.settings import ACTOR, load


def test_keys_of_the_identity(tmp_path):
    """Operational settings, the store's settings and the paths of inputs are not included."""
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


def test_differing_identity_settings_are_returned(tmp_path):
    old = load(tmp_path, "trainer.seed=1", "trainer.save_freq=3").config
    new = load(tmp_path, "trainer.seed=2", "trainer.save_freq=4", f"{ACTOR}.optim.lr=1e-5").config
    assert differing(old, new) == {"trainer.seed": (1, 2), f"{ACTOR}.optim.lr": (1e-6, 1e-5)}
    assert differing(old, old) == {}


def test_a_config_survives_the_round_trip_through_json(tmp_path):
    """run.json contains the config; attaching compares the stored config with the loaded one."""
    config = load(tmp_path, "data.train_files=[a, b]", f"{ACTOR}.optim.lr=1e-7").config
    again = RunConfig.model_validate(config.model_dump(mode="json"))
    assert again == config
    assert differing(again, config) == {}
