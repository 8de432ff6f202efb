"""verl's defaults where ours differ: what a verl script means that leaves a setting out."""

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
"""As of verl 0.9. clip_ratio has no effect in verl: these two replace it unless they are null."""

OTHER_DEFAULTS: dict[str, str] = {
    "data.train_files": "an example's file",
    "data.val_files": "an example's file",
    "data.seed": "null in verl; here it seeds the prompt order",
    "actor_rollout_ref.model.path": "an example's model",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "verl refuses to start without one",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "-1 means none, or lr_warmup_steps_ratio",
    "actor_rollout_ref.actor.megatron.override_transformer_config": "attention_backend=flash, and "
    "no recomputation",
    **dict.fromkeys(
        (
            f"actor_rollout_ref.{group}.log_prob_{name}"
            for group in ("rollout", "ref")
            for name in ("use_dynamic_bsz", "max_token_len_per_gpu")
        ),
        "the actor's, as verl's interpolation says",
    ),
    "actor_rollout_ref.ref.megatron.param_offload": "the actor's, as verl's interpolation says",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "rollout and training have GPUs of their "
    "own",
    "actor_rollout_ref.rollout.enforce_eager": "null is verl's value where there are GPUs",
    "critic.optim.lr_warmup_steps": "-1 means none, or lr_warmup_steps_ratio",
    "critic.forward_max_token_len_per_gpu": "ppo_max_token_len_per_gpu, as verl's interpolation "
    "says",
    **dict.fromkeys(
        (f"critic.megatron.{name}_offload" for name in ("param", "grad", "optimizer")),
        "the actor's where it is null",
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
        "the actor's, as verl's interpolation says",
    ),
    "custom_reward_function.name": "compute_score in verl too, under reward.custom_reward_function",
    "trainer.experiment_name": "an example's name",
    "trainer.project_name": "an example's name",
    "trainer.total_training_steps": "trainer.total_epochs decides in verl",
    "trainer.device": "auto is cuda where there are GPUs",
    "trainer.logger": "wandb is an extra and wants an account; [console,wandb] has it",
    "trainer.default_local_dir": "checkpoints lie in store.uri; this is for logs",
}
"""Other settings whose defaults differ, and why an import does not write verl's."""
