"""A critic's settings are refused in a run without a critic; in other runs, they must fit the
actor's settings."""

import pytest

from pipeline.config.critic import over_actor
from pipeline.config.rules.algorithms.critics import schedule_problems
from pipeline.config.rules.budget import budget, budget_problems, passes_of
from pipeline.config.rules.check import config_notes, config_problems
from tests.unit.config.settings import ACTOR, load

GAE = "algorithm.adv_estimator=gae"


def problems(tmp_path, *settings: str) -> list[str]:
    return config_problems(load(tmp_path, *settings).config, None)


@pytest.mark.parametrize(
    "setting",
    ["critic.optim.lr=1e-4", "critic.cliprange_value=0.2", "critic.ppo_epochs=2",
     "critic.replay_routes=True", "trainer.critic_warmup=3"],
)  # fmt: skip
def test_without_gae_a_critics_settings_are_refused(tmp_path, setting):
    key, _, _ = setting.partition("=")
    (problem,) = problems(tmp_path, setting)
    assert problem.startswith(f"{key}: found ")
    assert problem.endswith(
        "but algorithm.adv_estimator=grpo uses no critic; write algorithm.adv_estimator=gae, or "
        "leave the critic's settings out"
    )
    modes = [f"{ACTOR}.router_replay.mode=R2"] if "routes" in setting else []
    assert problems(tmp_path, setting, GAE, *modes) == []


def test_several_settings_give_one_problem(tmp_path):
    (problem,) = problems(tmp_path, "critic.optim.lr=1e-4", "critic.optim.clip_grad=2.0")
    assert problem.startswith("critic.optim.lr: found 0.0001 and 1 more such settings, but")


def test_repeated_defaults_of_a_critic_are_accepted(tmp_path):
    """In verl's files, the critic's settings repeat the critic's defaults or the actor's values."""
    written = ("critic.optim.lr=1e-5", f"{ACTOR}.ppo_epochs=4", "critic.ppo_epochs=4")
    assert problems(tmp_path, *written) == []


def test_micro_batch_sizes_without_a_critic_are_noted(tmp_path):
    found = load(tmp_path, "critic.ppo_micro_batch_size_per_gpu=3")
    assert config_problems(found.config, None) == []
    assert (
        "critic.ppo_micro_batch_size_per_gpu: 3 has no effect, because "
        "algorithm.adv_estimator=grpo uses no critic"
    ) in config_notes(found.config)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("critic.ppo_mini_batch_size=5", "expected a divisor of data.train_batch_size=32"),
        ("critic.replay_routes=True", "so no routes exist; write mode=R2 or mode=R3"),
        ("critic.loss_scale_factor=10", "only seq-mean-token-sum-norm divides by it"),
        ("critic.optim.min_lr=1.0", "expected at most critic.optim.lr=1e-05; write a smaller"),
        ("critic.optim.override_optimizer_config.adam_eps=0", "expected a number"),
    ],
)
def test_contradictions_are_refused(tmp_path, setting, expected):
    found = problems(tmp_path, GAE, setting)
    key = setting.partition("=")[0]
    assert any(problem.startswith(f"{key}: ") and expected in problem for problem in found), found
    assert all("actor.optim" not in problem for problem in found)


def test_a_divisor_may_apply_to_a_mode_inherited_from_the_actor(tmp_path):
    for owner in ("critic", ACTOR):
        settings = (f"{owner}.loss_agg_mode=seq-mean-token-sum-norm", "critic.loss_scale_factor=10")
        assert problems(tmp_path, GAE, *settings) == []


def test_a_schedule_that_does_not_fit_is_refused(tmp_path):
    settings = ("critic.optim.lr_warmup_steps=9", "critic.optim.lr_decay_steps=5")
    config = load(tmp_path, GAE, *settings, "critic.optim.lr_decay_style=linear").config
    (problem,) = schedule_problems(config)
    assert problem.startswith("critic.optim.lr_warmup_steps: found 9, expected fewer than")


def test_a_run_that_trains_only_the_critic_is_noted(tmp_path):
    config = load(tmp_path, GAE, "trainer.critic_warmup=50").config
    assert any("only the critic is trained" in note for note in config_notes(config))


def test_null_means_the_actors_value(tmp_path):
    written = (f"{ACTOR}.ppo_epochs=3", f"{ACTOR}.megatron.param_offload=True", "critic.optim.lr=1")
    config = load(tmp_path, GAE, *written, "critic.megatron.grad_offload=True").config
    found = over_actor(config.critic, config.actor_rollout_ref.actor)
    assert (found.ppo_epochs, found.optim.lr) == (3, 1)
    assert (found.megatron.param_offload, found.megatron.grad_offload) == (True, True)
    assert found.router_replay == config.actor_rollout_ref.actor.router_replay


def test_the_critics_passes_have_their_own_limits(tmp_path):
    dynamic = (
        f"{ACTOR}.use_dynamic_bsz=True",
        "critic.forward_max_token_len_per_gpu=900",
        f"{ACTOR}.megatron.context_parallel_size=2",
    )
    config = load(tmp_path, GAE, *dynamic).config
    assert passes_of(config) == ("update", "log_prob", "critic_update", "values")
    assert budget(config, "critic_update").tokens == 2 * 32_768
    assert budget(config, "values").tokens == 1800
    short = load(tmp_path, GAE, *dynamic, "critic.ppo_max_token_len_per_gpu=100").config
    (problem,) = budget_problems(short)
    assert problem.startswith("critic.ppo_max_token_len_per_gpu: found 100, expected at least 512")
    by_samples = load(tmp_path, GAE, "critic.forward_micro_batch_size_per_gpu=7").config
    assert budget(by_samples, "critic_update").samples == 8
    assert budget(by_samples, "values").samples == 7
