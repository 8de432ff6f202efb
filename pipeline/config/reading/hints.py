"""The fixes that messages give for certain wrong values, keyed by setting."""

_NO_HALF = "float16 requires loss scaling, which is not supported; write bfloat16"
_HALF = dict.fromkeys(("float16", "fp16", "half"), _NO_HALF)
_OWN = "is not supported here; write one of these names, or your own function (file.py:function)"
_ESTIMATORS = ("gdpo", "optimal_token_baseline", "tir_optimal_token_baseline")
_FULL = dict.fromkeys(("full", "full+"), "verl does not implement full; write one of these names")
_KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
_BYPASS = "algorithm.rollout_correction.bypass_mode"

REFUSED_VALUES = {
    "algorithm.adv_estimator": {name: f"{name} {_OWN}" for name in _ESTIMATORS},
    "actor_rollout_ref.actor.policy_loss.loss_mode": {
        "dro": f"dro {_OWN}",
        "bypass_mode": f"this loss has its own setting; write {_BYPASS}=True instead",
    },
    "actor_rollout_ref.actor.kl_loss_type": {
        **_FULL,
        **{
            f"{name}+": "+ (straight-through gradient) is not supported; write mse, whose gradient "
            f"is that of {name}+"
            for name in _KL_NAMES
        },
    },
    "algorithm.kl_penalty": {
        **_FULL,
        **{
            f"{name}+": "+ (straight-through gradient) is not supported, and would have no effect "
            f"on a reward; write {name}"
            for name in _KL_NAMES
        },
    },
    "actor_rollout_ref.rollout.dtype": _HALF,
    "actor_rollout_ref.actor.megatron.dtype": _HALF,
}
"""The fix for a verl value that Retrace does not support, keyed by setting and value.

An option with similar spelling would be the wrong suggestion for these values.
"""

NEAREST = {
    "algorithm.adv_estimator": {
        "ppo": "gae",
        "dapo": "grpo",
        "dr_grpo": "grpo",
        "grpo_vectorized": "grpo",
        "rloo_vectorized": "rloo",
    },
    "actor_rollout_ref.actor.policy_loss.loss_mode": {
        "ppo": "vanilla",
        "grpo": "vanilla",
        "dapo": "vanilla",
        "gmpo": "geo_mean",
    },
}
"""The option that users mean by a name from verl or from a paper, keyed by setting and name."""

_THRESHOLD = "write one number, or both bounds as text, such as 0.5_5.0"
_QUANTITY = "write a quantity such as 64Gi"

HINTS = {
    "actor_rollout_ref.actor.strategy": "FSDP is not supported: routing is replayed in "
    "Megatron-core; write megatron, or leave the key out",
    "actor_rollout_ref.rollout.name": "only vLLM is supported so far; write vllm, or leave the "
    "key out",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "write 0 for no warm-up",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "verl also requires this setting; "
    "write 1 or more, up to the number of samples that fit in memory",
    "algorithm.rollout_correction.rollout_is_threshold": _THRESHOLD,
    "algorithm.rollout_correction.rollout_rs_threshold": _THRESHOLD,
    "launch.kubernetes.rollout.memory": _QUANTITY,
    "launch.kubernetes.training.memory": _QUANTITY,
    "trainer.device": "only NVIDIA GPUs and CPUs are supported; write auto",
    "trainer.total_training_steps": "write the number of steps of the run",
}
"""The fix for other wrong values, keyed by setting, unless the value resembles an option.

Most of these values are valid in verl.
"""

EMPTY_HINTS = {"trainer.experiment_name": "write a name, such as my-run"}
"""The fix for an empty text or null, keyed by setting."""
