"""verl's alternative ways to write our settings: values that mean a default, and second names."""

import pytest

from pipeline.config.keys import is_set, value_at
from tests.unit.config.settings import ACTOR, MINIMAL, REPLAY, load, load_error

OPTIM = f"{ACTOR}.optim"
OTHER = f"{ACTOR}.megatron.router_replay"


@pytest.mark.parametrize(
    ("written", "key", "value", "note"),
    [
        ("trainer.total_training_steps=null", "trainer.total_training_steps", 10, None),
        (f"{OPTIM}.lr_warmup_steps=-1", f"{OPTIM}.lr_warmup_steps", 0, None),
        (f"{OPTIM}.lr_warmup_steps=null", f"{OPTIM}.lr_warmup_steps", 0, None),
        (f"{OPTIM}.lr_warmup_steps_ratio=null", f"{OPTIM}.lr_warmup_steps_ratio", 0.0, None),
        ("data.seed=null", "data.seed", 1, "null means the default here"),
        ("trainer.save_freq=-1", "trainer.save_freq", 10, "-1 means every 10 steps here"),
        ("trainer.logger=[console,clearml,wandb]", "trainer.logger", ["console", "wandb"],
         "found clearml, which is not supported yet; metrics are written to console, wandb"),
        ("trainer.logger=vemlp_wandb", "trainer.logger", ["console"], "found vemlp_wandb, which"),
        ("trainer.logger=tensorboard", "trainer.logger", ["tensorboard"], None),
        ("actor_rollout_ref.rollout.name=???", "actor_rollout_ref.rollout.name", "vllm", None),
        ("trainer.test_freq=-1", "trainer.test_freq", -1, None),
    ],
)  # fmt: skip
def test_values_that_mean_a_default(tmp_path, written, key, value, note):
    loaded = load(tmp_path, written)
    assert value_at(loaded.config, key) == value
    assert [text.startswith(f"{key}: {note}") for text in loaded.notes] == [True] * bool(note)


@pytest.mark.parametrize("key", [f"{ACTOR}.kl_loss_type", "algorithm.kl_penalty"])
@pytest.mark.parametrize(
    ("verls", "ours"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl"), ("abs", "abs")]
)
def test_verls_short_names_of_kl_estimators_are_accepted(tmp_path, key, verls, ours):
    """The names come from verl's kl_penalty_forward. run.json contains our names, so a
    start may use either name to attach to the run."""
    assert value_at(load(tmp_path, f"{key}={verls}").config, key) == ours


def test_a_ratio_sets_the_minimum_rate(tmp_path):
    """verl's FSDP trainer reads min_lr_ratio instead of min_lr. In that trainer and in ours, the
    cosine schedule falls from lr to min_lr_ratio times lr."""
    config = load(tmp_path, f"{OPTIM}.lr=2e-6", f"{OPTIM}.min_lr_ratio=0.1").config
    assert config.actor_rollout_ref.actor.optim.min_lr == 0.1 * 2e-6


def test_a_ratio_applies_to_the_default_rate(tmp_path):
    config = load(tmp_path, f"{OPTIM}.min_lr_ratio=0.5", f"{OPTIM}.min_lr=null").config
    assert config.actor_rollout_ref.actor.optim.min_lr == 0.5 * 1e-6


def test_two_minimum_rates_must_agree(tmp_path):
    found = load_error(tmp_path, f"{OPTIM}.min_lr_ratio=0.5", f"{OPTIM}.min_lr=1e-7")
    assert found == (
        f"{OPTIM}.min_lr_ratio: found 0.5; min_lr is the ratio times lr; leave one of min_lr and "
        "min_lr_ratio out",
    )


def test_the_penalty_of_the_dapo_recipe_is_read(tmp_path):
    """verl's main_dapo reads the penalty from reward_model.overlong_buffer."""
    buffer = "reward_model.overlong_buffer"
    settings = (f"{buffer}.enable=True", f"{buffer}.len=64", f"{buffer}.penalty_factor=1.0")
    config = load(tmp_path, *settings, f"{buffer}.log=False").config
    assert config.reward.reward_kwargs.overlong_buffer_cfg.len == 64


def test_a_null_does_not_count_as_a_value(tmp_path):
    """If it did, total_epochs would have no effect in verl's files."""
    config = load(tmp_path, "trainer.total_training_steps=null", "trainer.total_epochs=2").config
    assert not is_set(config, "trainer.total_training_steps")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("trainer.save_freq=often", "trainer.save_freq: found 'often' (text)"),
        ("trainer.save_freq=True", "trainer.save_freq: found True (true/false)"),
        ("trainer.logger=[console,carrier_pigeon]", "trainer.logger: item 1: found 'carrier_pigeo"),
        ("trainer.logger=3", "trainer.logger: item 0: found '3' (text)"),
        ("trainer.experiment_name=???", "trainer.experiment_name: missing"),
    ],
)
def test_invalid_values_are_refused(tmp_path, written, message):
    (problem,) = load_error(tmp_path, written)
    assert problem.startswith(message)


class TestTwoNames:
    """verl's own files contain every setting. A group with two names appears under both."""

    @pytest.mark.parametrize("default", ["null", "disabled"])
    @pytest.mark.parametrize("names", [(REPLAY, OTHER), (OTHER, REPLAY)])
    def test_the_value_that_differs_from_the_default_counts(self, tmp_path, names, default):
        one, two = names
        config = load(tmp_path, f"{one}.mode={default}", f"{two}.mode=R2").config
        assert config.actor_rollout_ref.actor.router_replay.mode == "R2"

    def test_names_of_classes_do_not_conflict(self, tmp_path):
        both = (f"{REPLAY}._target_=a", f"{OTHER}._target_=b")
        config = load(tmp_path, *both, f"{OTHER}.mode=R2").config
        assert config.actor_rollout_ref.actor.router_replay.mode == "R2"

    def test_an_empty_reward_function_under_the_other_name_is_ignored(self, tmp_path):
        empty = ("reward.custom_reward_function={path: null, name: compute_score}",)
        assert load(tmp_path, *empty).config == load(tmp_path).config
        text = MINIMAL.replace("{path: reward.py}", "{path: null, name: null}")
        other = load(tmp_path, "reward.custom_reward_function.path=reward.py", text=text)
        assert other.config.custom_reward_function.path == "reward.py"

    def test_two_different_values_are_an_error(self, tmp_path):
        (problem,) = load_error(tmp_path, f"{OTHER}.mode=R2", f"{REPLAY}.mode=R3")
        assert problem.endswith(f"is 'R3'; keep {REPLAY}.mode and remove the other")
