"""Rules for engine_kwargs.vllm: the engine arguments of vLLM 0.32.0 that a run may set.

The names of EngineArgs are copied here, because `pipeline` does not import vLLM; a test compares
them with the original. An argument is refused if it would lead to incorrect routes or log-probs, or
if it has its own setting.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import nearest, shown

KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"
_ROLLOUT = "actor_rollout_ref.rollout"

OWNED = {
    "dtype": f"{_ROLLOUT}.dtype",
    "enable_return_routed_experts": f"{_ROLLOUT}.enable_rollout_routing_replay",
    "enforce_eager": f"{_ROLLOUT}.enforce_eager",
    "gpu_memory_utilization": f"{_ROLLOUT}.gpu_memory_utilization",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "max_num_batched_tokens": f"{_ROLLOUT}.max_num_batched_tokens",
    "max_num_seqs": f"{_ROLLOUT}.max_num_seqs",
    "model": "actor_rollout_ref.model.path",
    "seed": "trainer.seed",
    "tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
}
"""Arguments that have their own setting, and the setting's name."""

_MODEL_FOLDER = "model, tokenizer and their configuration come from actor_rollout_ref.model.path"
_REASONS: dict[str, str] = {
    "routes are stored in blocks next to those of the prefix cache, which is always on": (
        "enable_prefix_caching"
    ),
    "this argument turns the recording of routes on or off": "aux_output_config",
    "the rows of a batch that is split in two overwrite each other's routes": (
        "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold"
    ),
    "keys and values that are loaded from elsewhere lack the routes of their rows": (
        "kv_transfer_config kv_offloading_size kv_offloading_backend ec_transfer_config "
        "ec_manager_config"
    ),
    "prompt rows would skip layers and have no routes there": "kv_sharing_fast_prefill",
    "engines have one pipeline stage and no context parallelism; with more, no routes would be "
    "recorded": (
        "pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size "
        "dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size"
    ),
    "drafted tokens are accepted several at a time, and rejected ones leave routes behind": (
        "speculative_config spec_method spec_model spec_tokens diffusion_config"
    ),
    "the engine's weights and log-probs would differ from the trainer's": (
        "quantization quantization_config allow_deprecated_quantization model_impl "
        "model_class_overrides hf_overrides"
    ),
    "keys and values of lower precision shift log-probs away from the trainer's": (
        "kv_cache_dtype kv_cache_dtype_skip_layers"
    ),
    "log-probs must refer to the distribution from which the engine samples": "logprobs_mode",
    "the argument changes how tokens are sampled, which the trainer cannot reproduce": (
        "logits_processors watermark_config generation_config override_generation_config "
        "return_sampling_mask enable_trace_replay"
    ),
    "adapters are not supported; all weights are trained": (
        "enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras "
        "lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels"
    ),
    "policies are loaded in place, from the store; weights kept elsewhere would not change": (
        "weight_transfer_config load_format model_loader_extra_config ignore_patterns "
        "pt_load_map_location offload_backend cpu_offload_gb cpu_offload_params "
        "offload_group_size offload_num_in_group offload_prefetch_step offload_params "
        "enable_eplb eplb_config"
    ),
    _MODEL_FOLDER: (
        "model_weights served_model_name tokenizer hf_config_path runner convert pooler_config "
        "skip_tokenizer_init tokenizer_mode trust_remote_code config_format revision code_revision "
        "hf_token tokenizer_revision download_dir"
    ),
    "the engine has no tokenizer: it gets and returns token ids": (
        "reasoning_config reasoning_parser reasoning_parser_plugin"
    ),
    "Retrace uses its own classes here, to record routes": (
        "worker_cls worker_extension_cls scheduler_cls"
    ),
    "each engine is one process group on one machine; add engines with launch.rollout_workers": (
        "data_parallel_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
        "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb "
        "data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_backend "
        "enable_elastic_ep elastic_ep_max_dp_size nnodes node_rank master_addr master_port "
        "_api_process_count _api_process_rank"
    ),
    "the launcher assigns each engine its GPUs": "device_ids",
}
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names.split()}
"""Arguments that no run may set, and the reasons."""

_ACCEPTED = """
additional_config aggregate_engine_logging all2all_backend allowed_local_media_path
allowed_media_domains async_scheduling attention_backend attention_config block_size
collect_detailed_traces compilation_config cpu_distributed_timeout_seconds
cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets disable_cascade_attn
disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
disable_log_stats disable_nccl_for_dp_synchronization disable_sliding_window
distributed_executor_backend distributed_timeout_seconds dp_sync_interval
enable_batch_sharded_sampling enable_chunked_prefill enable_cumem_allocator
enable_ep_weight_filter enable_expert_parallel enable_fault_tolerance enable_flashinfer_autotune
enable_hc_sp enable_layerwise_nvtx_tracing enable_logging_iteration_details
enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
enable_mm_embeds enable_mm_processor_stats enable_nccl_comm_suspend enable_prompt_embeds
enable_shm_tensor_arena enable_sleep_mode engram_config expert_placement_strategy
fail_on_environ_validation fault_tolerance_config gdn_prefill_backend interleave_mm_strings
io_processor_plugin ir_op_priority jit_monitor_mode jit_monitor_verbose kda_decode_backend
kda_prefill_backend kernel_config kv_cache_memory_bytes kv_cache_metrics kv_cache_metrics_sample
kv_events_config language_model_only limit_mm_per_prompt linear_backend log_config_file
log_level logging_config long_prefill_token_threshold long_prefill_token_threshold_adaptive
mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds
mamba_config mamba_ssm_cache_dtype mamba_ssu_algorithm max_cudagraph_capture_size max_logprobs
max_num_active_seqs max_num_queued_reqs max_num_queued_tokens max_num_scheduled_tokens
max_parallel_loading_workers media_io_kwargs mm_device_do_normalize mm_encoder_attn_backend
mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_margin
mm_encoder_fp8_scale_save_path mm_encoder_only mm_encoder_tp_mode mm_hasher_algorithm
mm_ipc_gpu_memory_gb mm_processor_cache_gb mm_processor_cache_type mm_processor_device
mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc moe_backend
num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes optimization_level
otlp_traces_endpoint per_request_spec_decode_metrics performance_mode prefill_schedule_interval
prefix_cache_retention_interval prefix_caching_hash_algo prefix_match_unit profiler_config
ray_workers_use_nsight renderer_num_workers replayssm_buffer_len safetensors_load_strategy
safetensors_prefetch_block_size safetensors_prefetch_num_threads scheduler_reserve_full_isl
scheduling_policy show_hidden_metrics_for_version shutdown_timeout skip_mm_profiling
sleep_mode_offload_cudagraph sleep_preserve_parameter_names sparse_indexer_topk_backend
stream_interval structured_outputs_config swa_bounded_replay tokens_only use_fp64_gumbel
use_replayssm use_tqdm_on_load video_pruning_method video_pruning_rate watermark
"""
ACCEPTED = tuple(_ACCEPTED.split())
"""Arguments that are passed to the engine unchanged."""


def engine_problems(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems with arguments that a run may not set, and with names unknown to vLLM."""
    for name, value in arguments.items():
        found = f"{KWARGS}.{name}: found {shown(value)}"
        if name in OWNED:
            yield f"{found}, which has its own setting; use {OWNED[name]} instead"
        elif name in REFUSED:
            yield f"{found}; {REFUSED[name]}; leave it out"
        elif name not in ACCEPTED:
            fix = nearest(name, (*ACCEPTED, *OWNED, *REFUSED))
            yield f"{KWARGS}.{name}: not an engine argument of vLLM 0.32.0; {fix}"
