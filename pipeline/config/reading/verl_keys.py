"""verl's settings that Retrace does not have and that no other setting determines.

- REFUSED: settings that would change a run's numbers if they were ignored, with the reason and with
  the values that match what Retrace always does.
- NOT_TAKEN_OVER: all others. They affect speed, memory, placement, logging or the order of random
  numbers, or verl reads them only if one of the refused settings is on.

REFUSED is consulted first.
"""

from typing import Any

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"

ALIASES = {
    f"{_ACTOR}.megatron.router_replay": f"{_ACTOR}.router_replay",
    "reward.custom_reward_function": "custom_reward_function",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
}
"""Our spelling of each group, keyed by another accepted spelling.

A file that sets both spellings to different values is refused.
"""

_ADAM = "the optimizer is Adam"
_DRIFT = "the model's config cannot be changed"
_HEAD = "the critic starts from the actor's weights, with a new value head"
_LORA = "adapters are not supported; all weights are trained"
_MCORE = "Megatron-core does the training"
_MTP = "multi-token prediction is not supported"
_ONE_TURN = "rollouts have one turn, without tools"
_PARQUET = "prompts are read from Parquet files, without custom classes or tools"
_QAT = "quantized training is not supported"
_REPLAY_FILE = "see actor.router_replay.replay_file"
_REWARDS = "rewards come from custom_reward_function or from the built-in scorers"
_SAMPLEWISE = "each sample is scored separately, in processes next to the engine"
_MANAGERS = ("naive", "dapo", "prime")

_Row = tuple[Any, ...]
"""Names, the reason and the harmless values; a row without values accepts only null."""

_ENGINE: tuple[_Row, ...] = (
    ("dynamic_context_parallel", "all sequences are split over context_parallel_size ranks", False),
    ("use_megatron_fsdp", "Megatron-FSDP is not supported; weights are split by TP, PP and EP",
     False),
    ("override_mcore_model_config override_mcore_model_config.*", _DRIFT),
    ("qat.enable", _QAT, False),
)  # fmt: skip
_OPTIMIZER: tuple[_Row, ...] = (
    ("weight_decay_incr_style", "in verl, weight decay begins and ends with the same value",
     "constant", "linear", "cosine"),
    ("optimizer", _ADAM, "adam"),
    ("num_cycles", "the cosine falls only once", 0.5),
    ("use_checkpoint_opt_param_scheduler", "the step number determines the learning rate", False),
)  # fmt: skip
_TRAINED: tuple[_Row, ...] = (
    ("forward_only", "the actor and the critic are always trained", False),
    ("use_dist_checkpointing", "training starts from the Hugging Face weights of model.path",
     False),
)  # fmt: skip
_OF_MODELS: tuple[_Row, ...] = (
    ("external_lib", "no other module is imported"),
    ("override_config.moe_config.freeze_moe_router", "the router is always trained", False),
    ("override_config override_config.*", _DRIFT),
    ("lora_rank lora.rank", _LORA, 0),
    ("mtp.enable", _MTP, False),
)
_MANAGER: tuple[_Row, ...] = (
    ("source", _REWARDS, "register"),
    ("name", _SAMPLEWISE, *_MANAGERS),
    ("module.path", _REWARDS),
)

REFUSED: dict[str, tuple[_Row, ...]] = {
    "": (
        ("defaults", "Hydra's list of other files is not read; `retrace import-verl` combines the "
         "files"),
        ("model_engine", _MCORE, "megatron"),
        ("distillation.enabled", "distillation is not supported", False),
        ("skip.*.enable", _REPLAY_FILE, False),
        ("*sandbox_fusion.url", "code is not run in a separate sandbox"),
    ),
    "data": (
        ("train_max_samples val_max_samples", "all prompts of the files are used; for fewer "
         "prompts, write a smaller file", -1),
        ("tokenizer", "the model's own tokenizer is used"),
        ("custom_cls.* sampler.* datagen.* *tool_config_path function_tool_path", _PARQUET),
        ("continuous_token.enable", _ONE_TURN, False),
    ),
    "algorithm": (
        ("use_pf_ppo", "PF-PPO is not supported", False),
        ("rollout_correction.rollout_is_threshold_lower",
         "give both bounds in rollout_is_threshold, such as 0.5_5.0"),
        ("rollout_correction.rollout_rs_threshold_lower",
         "give both bounds in rollout_rs_threshold, such as 0.5_2.0"),
        ("rollout_correction.use_policy_gradient", "the equivalent is "
         "rollout_correction.bypass_mode=True with loss_type=reinforce", False),
        ("rollout_is", "use algorithm.rollout_correction.rollout_is", False),
        ("rollout_is_threshold", "use algorithm.rollout_correction.rollout_is_threshold"),
    ),
    "trainer": (
        ("resume_mode", "the same experiment_name resumes a run; a new name starts one", "auto"),
        ("resume_from_path", "the run's state is in store.uri"),
        ("val_only", "use val_before_train in a separate run", False),
        ("v1.trainer_mode", "steps run one after another; trainer.max_staleness=1 overlaps rollout "
         "and training", "sync"),
        ("v1.sampler.custom_sampler.path", _PARQUET),
    ),
    "reward_model": (
        ("enable", _REWARDS, False),
        ("reward_manager", _SAMPLEWISE, *_MANAGERS),
    ),
    "reward_manager": _MANAGER,
    "reward.reward_model": (("enable", _REWARDS, False),),
    "reward.reward_manager": _MANAGER,
    _MODEL: (
        ("hf_config_path tokenizer_path", "config and tokenizer come from the model's folder"),
        ("custom_chat_template", "the tokenizer's own chat template is used"),
        ("override_config.attention_dropout override_config.embd_pdrop "
         "override_config.resid_pdrop", "training uses no dropout", 0.0),
        ("lora_adapter_path lora.adapter_path", _LORA),
        *_OF_MODELS,
    ),
    _ACTOR: (
        ("model_engine", _MCORE, "megatron"),
        ("ppo_micro_batch_size", f"use {_ACTOR}.ppo_micro_batch_size_per_gpu"),
        ("tis_imp_ratio_cap", "use algorithm.rollout_correction.rollout_is_threshold", -1),
        ("use_rollout_log_probs", "see algorithm.rollout_correction.bypass_mode", False),
        ("load_weight", "training starts from the model's weights", True),
        ("qat.enable", _QAT, False),
    ),
    f"{_ACTOR}.optim": _OPTIMIZER,
    f"{_ACTOR}.megatron": (*_ENGINE, *_TRAINED),
    _REF: (
        ("strategy model_engine", _MCORE, "megatron"),
        ("load_weight", "the reference is policy 0", True),
        ("*router_replay.mode", "the reference's own routers choose the experts", "disabled"),
        ("log_prob_micro_batch_size", f"use {_REF}.log_prob_micro_batch_size_per_gpu"),
    ),
    f"{_REF}.megatron": _ENGINE,
    _ROLLOUT: (
        ("logprobs_mode", "log-probs refer to the distribution from which the engine samples",
         "processed_logprobs"),
        ("log_prob_micro_batch_size", f"use {_ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
        ("ignore_eos", "responses end at the end-of-sequence token", False),
        ("do_sample", "the actor's rollouts are sampled", True),
        ("pipeline_model_parallel_size", "engines have one pipeline stage", 1),
        ("over_sample_rate", "a step generates exactly the samples of its plan", 0),
        ("skip_rollout skip.enable", _REPLAY_FILE, False),
        ("quantization quantization_config_file", "quantized rollouts are not supported"),
        ("qat.enable", _QAT, False),
        ("multi_turn.enable", _ONE_TURN, False),
        ("multi_turn.*_path agent.agent_loop_config_path", _ONE_TURN),
        ("agent.default_agent_loop", _ONE_TURN, "single_turn_agent"),
        ("agent.custom_async_server.path", "the engine is unmodified vLLM"),
        ("mtp.enable", _MTP, False),
    ),
    "critic": (
        ("strategy model_engine", _MCORE, "megatron"),
        ("ppo_micro_batch_size", "use critic.ppo_micro_batch_size_per_gpu"),
        ("forward_micro_batch_size", "use critic.forward_micro_batch_size_per_gpu"),
        ("load_weight", _HEAD, True),
    ),
    "critic.model": _OF_MODELS,
    "critic.optim": _OPTIMIZER,
    "critic.megatron": (
        ("override_ddp_config override_ddp_config.*", "the critic is laid out like the actor"),
        ("router_replay.mode", "see critic.replay_routes", "disabled"),
        *_ENGINE, *_TRAINED,
    ),
}  # fmt: skip
"""Rows for each group. The first row that matches applies, so single keys precede patterns."""

_ENGINE_REST = (
    "use_mbridge vanilla_mbridge pad_* entropy_from_logits_* dist_ckpt_* distrib_optim_* "
    "max_seqlen_per_dp_cp_rank dist_checkpointing_* qat.* seed"
)
_OPTIMIZER_REST = "muon_* use_layer_wise_distributed_optimizer total_training_steps"

NOT_TAKEN_OVER: dict[str, str] = {
    "": (
        "*_target_ hydra.* global_profiler.* ray_kwargs.* ray_init.* transfer_queue.* "
        "distillation.* skip.* *sandbox_fusion.* reward_model.* reward_manager.*"
    ),
    "data": (
        "trust_remote_code continuous_token.* image_* video_* audio_* mm_processor_kwargs* "
        "return_multi_modal_inputs return_raw_* return_full_prompt use_shm dataloader_num_workers "
        "filter_overlong_prompts_workers val_batch_size validation_shuffle"
    ),
    "algorithm": ("gdpo_reward_* pf_ppo.* filter_groups.max_inflight_gen_batches rollout_is_*"),
    "trainer": (
        "default_hdfs_dir max_*_ckpt_to_keep del_local_ckpt_after_load esi_redundant_time "
        "rollout_data_dir validation_data_dir log_val_generations balance_batch ray_* "
        "use_legacy_worker_impl use_v1 v1.*"
    ),
    "reward": "reward_model.* reward_manager.module.name reward_kwargs.overlong_buffer_cfg.log",
    "actor_rollout_ref": "hybrid_engine nccl_timeout",
    _MODEL: (
        "trust_remote_code lora_alpha target_modules exclude_modules lora.* mtp.* tiled_mlp.* "
        "use_liger enable_activation_offload enable_gradient_checkpointing use_remove_padding "
        "use_fused_kernels fused_kernel_options.* use_shm"
    ),
    _ACTOR: (
        "ppo_infer_max_token_len_per_gpu grad_clip fsdp_config.* ulysses_sequence_parallel_size "
        "policy_loss.dro_beta policy_loss.rollout_correction.* use_prefix_grouper checkpoint.* "
        "shuffle data_loader_seed calculate_entropy calculate_sum_pi_squared use_torch_compile "
        "use_fused_kernels entropy_*checkpointing entropy_from_logits_* freeze_vision_tower qat.* "
        "profiler.* profile.*"
    ),
    f"{_ACTOR}.optim": _OPTIMIZER_REST,
    f"{_ACTOR}.megatron": _ENGINE_REST,
    _REF: (
        "*router_replay.* entropy_from_logits_* use_torch_compile fsdp_config.* "
        "ulysses_sequence_parallel_size profiler.*"
    ),
    f"{_REF}.megatron": (
        "*_parallel_size sequence_parallel grad_offload optimizer_offload forward_only "
        "use_distributed_optimizer override_ddp_config override_ddp_config.* use_remove_padding "
        f"{_ENGINE_REST}"
    ),
    _ROLLOUT: (
        "mode nnodes n_gpus_per_node seed full_determinism data_parallel_size expert_parallel_size "
        "moe_tensor_parallel_size disaggregation.* skip.* skip_dump_dir qat.* limit_images "
        "engine_kwargs.vllm.disable_mm_preprocessor_cache engine_kwargs.sglang.* "
        "engine_kwargs.trtllm.* multi_turn.* agent.custom_async_server.name agent.num_workers "
        "mtp.* load_format layered_summon checkpoint_engine.* update_weights_* layer_name_map.* "
        "free_cache_engine multi_stage_wake_up enable_chunked_prefill enable_prefix_caching "
        "scheduling_policy cudagraph_capture_sizes skip_tokenizer_init disable_log_stats trace.* "
        "prometheus.* moe_load_balance_* profiler.*"
    ),
    "critic": (
        "ppo_infer_* grad_clip fsdp.* fsdp_config.* ulysses_* shuffle data_loader_seed "
        "checkpoint.* profiler.* profile.* nccl_timeout"
    ),
    "critic.model": "*",
    "critic.optim": _OPTIMIZER_REST,
    "critic.megatron": f"router_replay.* {_ENGINE_REST}",
}
"""Patterns for each group, separated by spaces."""
