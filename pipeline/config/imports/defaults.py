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

OTHER_DEFAULTS: dict[str, str] = {
    "data.train_files": "an example file",
    "data.val_files": "an example file",
    "data.seed": "verl's default is null; the default here fixes the prompt order",
    "actor_rollout_ref.model.path": "an example model",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "verl refuses to start without it",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "-1 means that lr_warmup_steps_ratio applies",
    "actor_rollout_ref.actor.megatron.override_transformer_config": "verl's values are "
    "attention_backend=flash and no recomputation",
    **dict.fromkeys(
        (
            f"actor_rollout_ref.{group}.log_prob_{name}"
            for group in ("rollout", "ref")
            for name in ("use_dynamic_bsz", "max_token_len_per_gpu")
        ),
        "null here and verl's interpolation both mean the actor's value",
    ),
    "actor_rollout_ref.ref.megatron.param_offload": "null here and verl's "
    "interpolation both mean the actor's value",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout and training have separate GPUs",
    "actor_rollout_ref.rollout.enforce_eager": "null means verl's value on GPUs",
    "critic.optim.lr_warmup_steps": "-1 means that lr_warmup_steps_ratio applies",
    "critic.forward_max_token_len_per_gpu": "null here and verl's interpolation both mean "
    "ppo_max_token_len_per_gpu",
    **dict.fromkeys(
        (f"critic.megatron.{name}_offload" for name in ("param", "grad", "optimizer")),
        "null means the actor's value",
    ),
    **dict.fromkeys(
        (
            f"critic.{name}"
            for name in (
                "ppo_mini_batch_size",
                "ppo_micro_batch_size_per_gpu",
                "use_dynamic_bsz",
                "ppo_epochs",
                "loss_agg_mode",
                "loss_scale_factor",
            )
        ),
        "null here and verl's interpolation both mean the actor's value",
    ),
    "custom_reward_function.name": "verl has the same default in reward.custom_reward_function",
    "trainer.experiment_name": "an example name",
    "trainer.project_name": "an example name",
    "trainer.total_training_steps": "verl computes it from trainer.total_epochs",
    "trainer.device": "auto means cuda on machines with GPUs",
    "trainer.logger": "wandb is an extra and needs an account; [console,wandb] enables it",
    "trainer.default_local_dir": "checkpoints are in store.uri; this folder is for logs",
}
"""For each other setting whose default differs, the reason why an import does not write verl's
default."""
