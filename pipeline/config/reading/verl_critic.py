"""verl's critic settings that Retrace lacks."""

from typing import Any

from pipeline.config.keys import value_at
from pipeline.config.reading.entries import (
    Entries,
    elsewhere,
    off,
    records,
    refused,
    same,
    seeds,
    speed,
    unread,
    with_prefix,
)
from pipeline.config.reading.foreign import Agreement
from pipeline.config.reading.verl_policy import engine, optimizer
from pipeline.config.tree import RunConfig

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ESTIMATOR = "algorithm.adv_estimator"
_AS_ACTOR = "the critic has the same layout and ranks as the actor and is computed in the same way"
_ONE_MODEL = "the critic starts from the actor's weights, with a new value head"
_NO_FSDP = "used only with FSDP, which is not supported"
_NO_LORA = "adapters are not supported; all weights are trained"
_NO_PROFILER = "Retrace has no profiler"


def _enabled(config: RunConfig, _: str, enabled: bool) -> bool:
    return enabled is config.has_critic


def _of_actor(config: RunConfig, key: str, value: Any) -> bool:
    """Return whether the value equals the actor's, or the run has no critic."""
    return not config.has_critic or value == value_at(
        config, key.replace("critic.", f"{_ACTOR}.", 1)
    )


def _of_model(config: RunConfig, key: str, value: Any) -> bool:
    return not config.has_critic or value == config.actor_rollout_ref.model.path


def _override(config: RunConfig, key: str, value: Any) -> bool:
    overrides = config.actor_rollout_ref.actor.megatron.override_transformer_config
    return not config.has_critic or value == overrides.get(key.rpartition(".")[2])


def _of_rollout(config: RunConfig, _: str, value: Any) -> bool:
    return not config.has_critic or value == config.actor_rollout_ref.rollout.n


_LAYOUT = Agreement(_of_actor, f"use the value from {_ACTOR}.megatron, or leave the key out")

CRITIC: Entries = [
    *with_prefix(
        "critic",
        elsewhere(
            "enable",
            "only algorithm.adv_estimator=gae uses a critic",
            Agreement(_enabled, f"change {_ESTIMATOR}, or leave the key out"),
        ),
        elsewhere(
            "rollout_n",
            "rollout.n determines this value",
            Agreement(_of_rollout, "leave the key out"),
        ),
        same("strategy", "Megatron-core does the training", "megatron"),
        same("model_engine", "Megatron-core does the training", "megatron"),
        same("ppo_micro_batch_size", "use critic.ppo_micro_batch_size_per_gpu"),
        same("forward_micro_batch_size", "use critic.forward_micro_batch_size_per_gpu"),
        speed("ppo_infer_*", "see critic.forward_max_token_len_per_gpu"),
        unread("grad_clip", "used only with FSDP; see critic.optim.clip_grad", "critic.strategy"),
        unread("fsdp.* fsdp_config.* ulysses_*", _NO_FSDP, "critic.strategy"),
        same("load_weight", _ONE_MODEL, True),
        seeds("shuffle data_loader_seed", "trainer.seed determines the mini-batches"),
        records("checkpoint.*", "a checkpoint contains everything that a restart needs"),
        records("profiler.* profile.*", _NO_PROFILER),
        speed("nccl_timeout", "see launch.step_timeout_s"),
    ),
    *with_prefix(
        "critic.model",
        elsewhere(
            "path", _ONE_MODEL, Agreement(_of_model, f"write {_MODEL}.path, or leave the key out")
        ),
        speed("tokenizer_path hf_config_path", "the critic has the actor's config and tokenizer"),
        same("external_lib", "no other module is imported"),
        unread("trust_remote_code", "a model's own code is never run", f"{_MODEL}.path"),
        same("lora_rank lora.rank", _NO_LORA, 0),
        unread("lora_alpha target_modules exclude_modules", _NO_LORA, "critic.model.lora_rank"),
        unread("lora.*", _NO_LORA, "critic.model.lora.rank"),
        speed("use_remove_padding use_fused_kernels use_shm tiled_mlp.*", _AS_ACTOR),
        speed("enable_gradient_checkpointing enable_activation_offload", _AS_ACTOR),
        unread("fsdp_config.*", _NO_FSDP, "critic.strategy"),
        off("override_config.moe_config.freeze_moe_router", "the router is always trained"),
        refused("override_config override_config.*", "the model's config cannot be changed"),
        off("mtp.enable", "multi-token prediction is not supported"),
        unread("*", "the critic's model is the actor's, with a value head", "critic.model.path"),
    ),
    *optimizer("critic.optim"),
    *with_prefix(
        "critic.megatron",
        elsewhere("*_parallel_size sequence_parallel", _AS_ACTOR, _LAYOUT),
        elsewhere("use_distributed_optimizer use_remove_padding dtype", _AS_ACTOR, _LAYOUT),
        elsewhere(
            "override_transformer_config.*",
            _AS_ACTOR,
            Agreement(_override, "set the same value for the actor, or leave the key out"),
        ),
        refused("override_ddp_config override_ddp_config.*", _AS_ACTOR),
        same("router_replay.mode", "see critic.replay_routes", "disabled"),
        unread("router_replay.*", "see critic.replay_routes", "critic.megatron.router_replay.mode"),
        off("forward_only", "the critic is always trained"),
        off("use_dist_checkpointing", _ONE_MODEL),
    ),
    *engine("critic.megatron"),
]
"""The first entry that matches applies, so entries for single keys precede those for their
group."""
