"""verl's settings under actor_rollout_ref that Retrace does not have."""

from dataclasses import replace
from math import isclose
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
from pipeline.config.reading.foreign import Agreement, same_value
from pipeline.config.tree import RunConfig

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_OVERRIDE = f"{_ACTOR}.megatron.override_transformer_config"
_PATH = f"{_MODEL}.path"

_ADAM = "the optimizer is Adam"
_NO_CODE = "a model's own code is never run; config.json and tokenizer.json are read instead"
_NO_CUT = "the engine schedules its own batches"
_NO_FSDP = "used only with FSDP, which is not supported"
_NO_LORA = "adapters are not supported; all weights are trained"
_NO_MTP = "multi-token prediction is not supported"
_NO_PROFILER = "Retrace has no profiler"
_NO_QAT = "quantized training is not supported"
_OTHER_ENGINE = "used only with a different engine"
_ONE_MODEL = "the model's config cannot be changed"
_RESIDENT = "rollout and training are separate processes, each with its own memory"
_SINGLE_TURN = "rollouts have one turn, without tools"
_STORE = "weights are transferred through the store"

_SPEED_FIELDS = (
    "recompute_granularity",
    "recompute_method",
    "recompute_modules",
    "recompute_num_layers",
    "gradient_accumulation_fusion",
    "sequence_parallel",
    "attention_backend",
    "use_flash_attn",
)
"""Fields of TransformerConfig that change the results of a forward pass only by rounding."""


def _long_enough(config: RunConfig, _: str, length: int) -> bool:
    return length >= config.data.max_prompt_length + config.data.max_response_length


def _greedy_or_sampled(config: RunConfig, _: str, sampled: bool) -> bool:
    return sampled or config.actor_rollout_ref.rollout.val_kwargs.temperature == 0


def _logged(config: RunConfig, _: str, logged: bool) -> bool:
    return logged or not config.algorithm.rollout_correction.corrects


def _as_the_actor(config: RunConfig, key: str, value: Any) -> bool:
    """Return whether the field has the actor's value, or the run has no reference policy."""
    actor = config.actor_rollout_ref.actor
    name = key.rpartition(".")[2]
    return not config.has_reference or value == actor.megatron.override_transformer_config.get(name)


def _one_dtype(config: RunConfig, _: str, value: Any) -> bool:
    return bool(value == value_at(config, f"{_ACTOR}.megatron.dtype"))


def _least_rate(config: RunConfig, key: str, ratio: Any) -> bool:
    """Return whether min_lr is verl's ratio times lr.

    If the user did not set min_lr, `plain_values` has already computed it from the ratio.
    """
    optim = value_at(config, key.rpartition(".")[0])
    return isinstance(ratio, int | float) and isclose(optim.min_lr, ratio * optim.lr)


def _decay_style(config: RunConfig, key: str, value: Any) -> bool:
    return bool(value == value_at(config, f"{key.rpartition('.')[0]}.lr_decay_style"))


def _no_reference(config: RunConfig, _: str, value: Any) -> bool:
    """Return whether the value is False, or the run has no reference policy to read it."""
    return value is False or not config.has_reference


_LENGTH = Agreement(
    _long_enough, "write at least data.max_prompt_length + data.max_response_length, or null"
)

_ENGINE: Entries = [
    *speed("use_mbridge vanilla_mbridge", "weights are converted by mbridge"),
    *speed("pad_* entropy_from_logits_*", "logits are computed in chunks of tokens"),
    *speed("dist_ckpt_* distrib_optim_*", "checkpoints have their own format"),
    *off("dynamic_context_parallel", "all sequences are split over context_parallel_size ranks"),
    *unread("max_seqlen_per_dp_cp_rank", "only with dynamic CP", "dynamic_context_parallel"),
    *off("use_megatron_fsdp", "Megatron-FSDP is not supported; weights are split by TP, PP and EP"),
    *unread("dist_checkpointing_*", "see use_dist_checkpointing", "use_dist_checkpointing"),
    *refused("override_mcore_model_config override_mcore_model_config.*", _ONE_MODEL),
    *off("qat.enable", _NO_QAT),
    *unread("qat.*", _NO_QAT, "qat.enable"),
    *seeds("seed", "see trainer.seed"),
]


def engine(prefix: str) -> Entries:
    """Return the entries for Megatron's settings of the actor, the reference or the critic."""
    return [
        replace(one, guard=f"{prefix}.{one.guard}" if one.guard else "")
        for one in with_prefix(prefix, _ENGINE)
    ]


def optimizer(prefix: str) -> Entries:
    """Return the entries for the optimizer settings of the actor or the critic."""
    return with_prefix(
        prefix,
        same(
            "weight_decay_incr_style",
            "in verl, weight decay begins and ends with the same value",
            "constant",
            "linear",
            "cosine",
        ),
        same("optimizer", _ADAM, "adam"),
        elsewhere(
            "min_lr_ratio",
            "min_lr is the ratio times lr",
            Agreement(_least_rate, "leave one of min_lr and min_lr_ratio out"),
        ),
        elsewhere(
            "lr_scheduler_type warmup_style",
            "this setting is called lr_decay_style here",
            Agreement(_decay_style, f"write it as {prefix}.lr_decay_style, or leave it out"),
        ),
        same("num_cycles", "the cosine falls only once", 0.5),
        unread("muon_* use_layer_wise_distributed_optimizer", _ADAM, f"{prefix}.optimizer"),
        off("use_checkpoint_opt_param_scheduler", "the step number determines the learning rate"),
        unread(
            "total_training_steps",
            "verl sets it to trainer.total_training_steps",
            "trainer.total_training_steps",
        ),
    )


POLICY: Entries = [
    *speed("actor_rollout_ref.hybrid_engine", _RESIDENT),
    *speed("actor_rollout_ref.nccl_timeout", "see launch.step_timeout_s"),
    *with_prefix(
        _MODEL,
        same("hf_config_path tokenizer_path", "config and tokenizer come from the model's folder"),
        same("custom_chat_template", "the tokenizer's own chat template is used"),
        unread("trust_remote_code", _NO_CODE, _PATH),
        same("external_lib", "no other module is imported"),
        off("override_config.moe_config.freeze_moe_router", "the router is always trained"),
        elsewhere(
            "override_config.max_position_embeddings "
            "override_config.model_config.max_position_embeddings",
            "samples never exceed the limits in data, and config.json must allow samples this long",
            _LENGTH,
        ),
        same(
            "override_config.attention_dropout override_config.embd_pdrop "
            "override_config.resid_pdrop",
            "training uses no dropout",
            0.0,
        ),
        refused("override_config override_config.*", _ONE_MODEL),
        same("lora_rank lora.rank", _NO_LORA, 0),
        same("lora_adapter_path lora.adapter_path", _NO_LORA),
        unread("lora_alpha target_modules exclude_modules", _NO_LORA, f"{_MODEL}.lora_rank"),
        unread("lora.*", _NO_LORA, f"{_MODEL}.lora.rank"),
        off("mtp.enable", _NO_MTP),
        unread("mtp.*", _NO_MTP, f"{_MODEL}.mtp.enable"),
        speed(
            "tiled_mlp.* use_liger enable_activation_offload", "Megatron-core implements the model"
        ),
        speed(
            "enable_gradient_checkpointing",
            "see actor.megatron.override_transformer_config.recompute_granularity",
        ),
        speed(
            "use_remove_padding use_fused_kernels fused_kernel_options.* use_shm",
            "see actor.megatron.use_remove_padding and override_transformer_config",
        ),
    ),
    *with_prefix(
        _ACTOR,
        same("model_engine", "Megatron-core does the training", "megatron"),
        same("ppo_micro_batch_size", f"use {_ACTOR}.ppo_micro_batch_size_per_gpu"),
        speed(
            "ppo_infer_max_token_len_per_gpu",
            "see rollout.log_prob_max_token_len_per_gpu and ref.log_prob_max_token_len_per_gpu",
        ),
        unread("grad_clip", "used only with FSDP; see actor.optim.clip_grad", f"{_ACTOR}.strategy"),
        unread("fsdp_config.* ulysses_sequence_parallel_size", _NO_FSDP, f"{_ACTOR}.strategy"),
        unread(
            "policy_loss.dro_beta policy_loss.rollout_correction.*",
            "used only by losses that are not supported",
            f"{_ACTOR}.policy_loss.loss_mode",
        ),
        same("tis_imp_ratio_cap", "use algorithm.rollout_correction.rollout_is_threshold", -1),
        off("use_rollout_log_probs", "see algorithm.rollout_correction.bypass_mode"),
        speed("use_prefix_grouper", "samples of a group are not packed together"),
        same("load_weight", "training starts from the model's weights", True),
        records("checkpoint.*", "a checkpoint contains everything that a restart needs"),
        seeds("shuffle data_loader_seed", "trainer.seed determines the mini-batches"),
        elsewhere("rollout_n", "rollout.n determines this value", same_value(f"{_ROLLOUT}.n")),
        records("calculate_entropy", "see entropy_coeff"),
        unread("calculate_sum_pi_squared", "for unsupported estimators", "algorithm.adv_estimator"),
        speed("use_torch_compile use_fused_kernels entropy_*checkpointing", "used only with FSDP"),
        speed("entropy_from_logits_*", "used only with FSDP"),
        unread("freeze_vision_tower", "only text models are supported", _PATH),
        off("qat.enable", _NO_QAT),
        unread("qat.*", _NO_QAT, f"{_ACTOR}.qat.enable"),
        records("profiler.* profile.*", _NO_PROFILER),
    ),
    *optimizer(f"{_ACTOR}.optim"),
    *engine(f"{_ACTOR}.megatron"),
    *off(f"{_ACTOR}.megatron.forward_only", "the actor is always trained"),
    *off(
        f"{_ACTOR}.megatron.use_dist_checkpointing",
        "the model starts from the Hugging Face weights of model.path",
    ),
    *with_prefix(
        "actor_rollout_ref.ref",
        same("strategy model_engine", "Megatron-core computes the reference", "megatron"),
        same("load_weight", "the reference is policy 0", True),
        same("*router_replay.mode", "the reference's own routers choose the experts", "disabled"),
        unread(
            "*router_replay.*",
            "see actor.router_replay",
            "actor_rollout_ref.ref.router_replay.mode",
        ),
        elsewhere("rollout_n", "rollout.n determines this value", same_value(f"{_ROLLOUT}.n")),
        same("log_prob_micro_batch_size", f"use {_REF}.log_prob_micro_batch_size_per_gpu"),
        speed("entropy_from_logits_*", "logits are computed in chunks of tokens"),
        speed("use_torch_compile", "used only with FSDP"),
        unread("fsdp_config.* ulysses_sequence_parallel_size", _NO_FSDP, f"{_ACTOR}.strategy"),
        records("profiler.*", _NO_PROFILER),
    ),
    *with_prefix(
        "actor_rollout_ref.ref.megatron",
        speed("*_parallel_size sequence_parallel", "the reference has the actor's layout"),
        speed("grad_offload optimizer_offload", "the reference has no gradients and no optimizer"),
        speed("use_distributed_optimizer forward_only", "the reference is not trained"),
        speed("override_ddp_config override_ddp_config.*", "the reference has no gradients"),
        speed("use_remove_padding", "the reference packs micro-batches as the actor does"),
        elsewhere(
            "use_dist_checkpointing",
            "the reference is policy 0",
            Agreement(_no_reference, "write False or leave the key out"),
        ),
        elsewhere(
            "dtype",
            "the reference has the actor's data type",
            Agreement(_one_dtype, f"change {_ACTOR}.megatron.dtype, or leave the key out"),
        ),
        *(
            speed(f"override_transformer_config.{name}", "the reference is computed like the actor")
            for name in _SPEED_FIELDS
        ),
        elsewhere(
            "override_transformer_config.*",
            "the reference is computed like the actor",
            Agreement(_as_the_actor, f"write the same in {_OVERRIDE}, or leave the key out"),
        ),
    ),
    *engine("actor_rollout_ref.ref.megatron"),
    *with_prefix(
        _ROLLOUT,
        speed("mode nnodes n_gpus_per_node", "engines are separate processes; see launch"),
        elsewhere(
            "prompt_length",
            "data.max_prompt_length determines this value",
            same_value("data.max_prompt_length"),
        ),
        elsewhere(
            "response_length",
            "data.max_response_length determines this value",
            same_value("data.max_response_length"),
        ),
        elsewhere("max_model_len", "a smaller value would cut responses short", _LENGTH),
        elsewhere(
            "calculate_log_probs",
            "the engine's log-probs are always recorded, and rollout_correction uses them",
            Agreement(_logged, "write True, or no correction in algorithm.rollout_correction"),
        ),
        same(
            "logprobs_mode",
            "log-probs refer to the distribution from which the engine samples",
            "processed_logprobs",
        ),
        same("log_prob_micro_batch_size", f"use {_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        off("ignore_eos", "responses end at the end-of-sequence token"),
        same("do_sample", "the actor's rollouts are sampled", True),
        elsewhere(
            "val_kwargs.do_sample",
            "val_kwargs.temperature determines this value; 0 means greedy",
            Agreement(
                _greedy_or_sampled,
                "write actor_rollout_ref.rollout.val_kwargs.temperature=0 for greedy, "
                "or do_sample=True",
            ),
        ),
        seeds("seed full_determinism", "trainer.seed determines the seed of each sample"),
        speed("data_parallel_size", "use launch.rollout_workers for more engines"),
        speed("expert_parallel_size moe_tensor_parallel_size", "experts are split by TP"),
        same("pipeline_model_parallel_size", "engines have one pipeline stage", 1),
        speed("disaggregation.*", "each engine does both prefill and decoding"),
        same("over_sample_rate", "a step generates exactly the samples of its plan", 0),
        off("skip_rollout skip.enable", "see actor.router_replay.replay_file"),
        unread("skip.*", "see actor.router_replay.replay_file", f"{_ROLLOUT}.skip.enable"),
        unread("skip_dump_dir", "see actor.router_replay.replay_file", f"{_ROLLOUT}.skip_rollout"),
        same("quantization quantization_config_file", "quantized rollouts are not supported"),
        off("qat.enable", _NO_QAT),
        unread("qat.*", _NO_QAT, f"{_ROLLOUT}.qat.enable"),
        unread("limit_images", "only text models are supported", _PATH),
        elsewhere(
            "engine_kwargs.vllm.max_model_len", "a smaller value would cut responses short", _LENGTH
        ),
        speed("engine_kwargs.vllm.disable_mm_preprocessor_cache", _NO_CUT),
        unread("engine_kwargs.sglang.* engine_kwargs.trtllm.*", _OTHER_ENGINE, f"{_ROLLOUT}.name"),
        off("multi_turn.enable", _SINGLE_TURN),
        same("multi_turn.*_path agent.agent_loop_config_path", _SINGLE_TURN),
        unread("multi_turn.*", _SINGLE_TURN, f"{_ROLLOUT}.multi_turn.enable"),
        same("agent.default_agent_loop", _SINGLE_TURN, "single_turn_agent"),
        same("agent.custom_async_server.path", "the engine is unmodified vLLM"),
        unread(
            "agent.custom_async_server.name",
            "the engine is unmodified vLLM",
            f"{_ROLLOUT}.agent.custom_async_server.path",
        ),
        speed("agent.num_workers", "engines are separate processes; see launch"),
        off("mtp.enable", _NO_MTP),
        unread("mtp.*", _NO_MTP, f"{_ROLLOUT}.mtp.enable"),
        speed("load_format layered_summon checkpoint_engine.* update_weights_*", _STORE),
        speed("layer_name_map.*", _STORE),
        speed("free_cache_engine multi_stage_wake_up", _RESIDENT),
        speed("enable_chunked_prefill enable_prefix_caching scheduling_policy", _NO_CUT),
        speed("cudagraph_capture_sizes skip_tokenizer_init", _NO_CUT),
        records(
            "disable_log_stats trace.* prometheus.* moe_load_balance_*", "see the run's report"
        ),
        records("profiler.*", _NO_PROFILER),
    ),
]
"""The first entry that matches applies, so single keys precede their group."""
