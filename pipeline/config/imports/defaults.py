"""verl's defaults that differ from ours; they supply the settings that a verl script omits."""

from typing import Any

VERL_DEFAULTS: dict[str, Any] = {
    "data.train_batch_size": 1024,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.2,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "algorithm.adv_estimator": "gae",
    "trainer.total_epochs": 30,
    "trainer.n_gpus_per_node": 8,
    "trainer.save_freq": -1,
}
"""Defaults of verl 0.9.

With these values of clip_ratio_low and clip_ratio_high, clip_ratio has no effect, as in verl.
"""
