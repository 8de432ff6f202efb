"""verl's settings that are not ours: which are accepted without effect, which are refused, and why.

Users of verl can use their files. A setting without meaning here is accepted with a note; one that
would make the run differ from what the user asked for is refused with the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

ALIASES = {
    "actor_rollout_ref.actor.megatron.router_replay": "actor_rollout_ref.actor.router_replay",
    "reward.custom_reward_function": "custom_reward_function",
}
"""Other spellings of a group, and ours. Two spellings with different values are an error."""

HINTS = {
    "actor_rollout_ref.actor.strategy": "FSDP is not supported: routing is replayed in "
    "Megatron-core; write megatron, or leave the key out",
    "actor_rollout_ref.rollout.name": "only vLLM is supported so far; write vllm, or leave the "
    "key out",
    "actor_rollout_ref.actor.megatron.context_parallel_size": "context parallelism is not "
    "supported yet; write 1",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "write 0 for no warm-up",
    "actor_rollout_ref.actor.loss_agg_mode": "only token-mean is supported so far; write "
    "token-mean, or leave the key out",
    "algorithm.adv_estimator": "only GRPO is supported so far; write grpo",
    "algorithm.rollout_correction.rollout_is": "only weights per token are supported; write token "
    "or null",
    "trainer.logger": "only console and tensorboard are supported so far; write "
    "[console,tensorboard]",
    "trainer.save_freq": "a restart needs checkpoints, so they cannot be switched off; write how "
    "many steps may be trained again, for example 10",
    "trainer.total_training_steps": "write the number of steps of the run",
    "data.seed": "write a number, or leave the key out",
}
"""The fix for a value that verl accepts and we do not, by key."""

_ANYTHING = object()


@dataclass(frozen=True)
class Foreign:
    """Settings of verl that are not ours.

    Example: Foreign('rollout.data_parallel_size', ..., harmless=(1,)).
    """

    pattern: str
    """Dotted key; `*` matches any characters."""
    reason: str
    harmless: tuple[Any, ...] | object = _ANYTHING
    """Values that are accepted with a note; others are refused. _ANYTHING: all are accepted."""

    def accepts(self, value: Any) -> bool:
        """Whether a value is accepted without effect."""
        if not isinstance(self.harmless, tuple):
            return True
        # True == 1 in Python, but not in a settings file.
        return any(
            value == h and isinstance(value, bool) == isinstance(h, bool) for h in self.harmless
        )

    @property
    def outcome(self) -> str:
        """The treatment of the setting, in the words of docs/config.md."""
        if not isinstance(self.harmless, tuple):
            return "ignored"
        if not self.harmless:
            return "refused"
        return f"{_values(self.harmless)} ignored, else refused"

    @property
    def refusal(self) -> str:
        """Reason and fix of a refusal."""
        if isinstance(self.harmless, tuple) and self.harmless:
            return f"{self.reason}; write {_values(self.harmless)} or leave the key out"
        return f"{self.reason}; leave the key out"


def find_foreign(key: str) -> Foreign | None:
    """The first entry of the table that matches a key of verl; None: not in the table."""
    return next((entry for entry in FOREIGN if _matches(key, entry.pattern)), None)


def _matches(key: str, pattern: str) -> bool:
    # "critic.*" also matches an empty or null "critic".
    return fnmatchcase(key, pattern) or pattern == f"{key}.*"


def _values(values: Sequence[Any]) -> str:
    shown = [value for value in values if value is not None] or ["null"]
    return " or ".join(str(value) for value in shown)


def _table() -> list[Foreign]:
    entries = list(_ANYWHERE)
    for prefix, group in _GROUPS.items():
        for names, reason, *harmless in group:
            entries += [Foreign(prefix + name, reason, *harmless) for name in names.split()]
    return entries


_OFF = (None, False)
_NONE = (None,)
_EMPTY: tuple[Any, ...] = (None, {})
_NO_PROFILER = "there is no profiler here"
_MICRO = "micro-batches are cut by ppo_micro_batch_size_per_gpu, and padded"
_SEPARATE = "rollout and training are always separate processes (disaggregated)"
_DATALOADER = "prompts are staged into the store once, not loaded by a data loader"
_SINGLE_TURN = "rollouts have one turn, without tools"
_NO_LORA = "adapters are not supported; all weights are trained"
_NO_CUT = "batches of the engine are its own affair"
_GRPO_ONLY = "GRPO does not use it"

_ANYWHERE = [
    Foreign("*_target_", "Hydra's marker of classes means nothing here"),
    Foreign("hydra.*", "Hydra is not used"),
    Foreign(
        "defaults", "Hydra's list of other files: `retrace import-verl` makes one file of all", ()
    ),
]

# Group of keys -> (names, reason, harmless values; without them every value is harmless).
_GROUPS: dict[str, list[tuple[Any, ...]]] = {
    "data.": [
        ("truncation", "prompts are never cut: see filter_overlong_prompts", ("error",)),
        (
            "train_max_samples val_max_samples",
            "all prompts are used; make a smaller file",
            (None, -1),
        ),
        ("tokenizer", "the tokenizer is the model's", _NONE),
        ("trust_remote_code", "code that comes with a model is never run", _OFF),
        ("custom_cls.* sampler.* datagen.* tool_config_path", "prompts are Parquet files", _NONE),
        ("apply_chat_template_kwargs", "the chat template gets no further arguments", _EMPTY),
        ("apply_chat_template_kwargs.*", "the chat template gets no further arguments", ()),
        ("return_* image_* video_*", "prompts are text"),
        ("use_shm dataloader_num_workers filter_overlong_prompts_workers", _DATALOADER),
        ("val_batch_size validation_shuffle", "a validation takes all its prompts at once"),
    ],
    "actor_rollout_ref.": [
        ("hybrid_engine", _SEPARATE),
        ("nccl_timeout", "see launch.step_timeout_s"),
        ("ref.*", "the reference is policy 0, in the actor's own parallel layout"),
    ],
    "actor_rollout_ref.model.": [
        ("hf_config_path tokenizer_path", "config and tokenizer lie in the model's folder", _NONE),
        ("custom_chat_template", "the chat template is the tokenizer's", _NONE),
        ("trust_remote_code", "code that comes with a model is never run", _OFF),
        ("external_lib", "no further module is imported", _NONE),
        ("override_config override_config.*_config", "the model's config is used as it is", _EMPTY),
        ("override_config.moe_config.freeze_moe_router", "the router is trained", _OFF),
        ("override_config.*", "the model's config is used as it is", ()),
        ("lora_rank lora.rank", _NO_LORA, (None, 0)),
        ("lora_adapter_path", _NO_LORA, _NONE),
        ("lora_alpha lora.* target_modules exclude_modules", _NO_LORA),
        ("mtp.enable", "multi-token prediction is not supported", _OFF),
        ("mtp.*", "multi-token prediction is not supported"),
        ("tiled_mlp.enabled use_liger", "the model is Megatron-core's", _OFF),
        ("enable_activation_offload", "activations are not offloaded", _OFF),
        (
            "enable_gradient_checkpointing",
            "see actor.megatron.override_transformer_config.recompute_granularity",
        ),
        (
            "use_remove_padding use_fused_kernels fused_kernel_options.* tiled_mlp.* use_shm",
            "Megatron-core decides by override_transformer_config",
        ),
    ],
    "actor_rollout_ref.actor.": [
        ("ppo_micro_batch_size", "use ppo_micro_batch_size_per_gpu", _NONE),
        ("use_dynamic_bsz ppo_max_token_len_per_gpu ppo_infer_max_token_len_per_gpu", _MICRO),
        ("grad_clip", "use actor_rollout_ref.actor.optim.clip_grad", _NONE),
        ("fsdp_config.* ulysses_sequence_parallel_size", "for FSDP, which is not used here"),
        ("policy_loss.loss_mode", "only PPO's clipped loss is supported so far", ("vanilla",)),
        ("policy_loss.* tau_pos tau_neg", "for other losses than PPO's clipped loss"),
        ("loss_scale_factor", "for other loss_agg_mode than token-mean"),
        ("use_prefix_grouper", "samples of a group are not packed together", _OFF),
        ("load_weight", "training starts from the model's weights", (True,)),
        ("checkpoint.*", "a checkpoint holds everything that a restart needs"),
        ("shuffle data_loader_seed", "samples are always shuffled, seeded by trainer.seed"),
        ("rollout_n", "see rollout.n"),
        ("calculate_entropy", "see entropy_coeff"),
        ("use_torch_compile use_fused_kernels entropy_*checkpointing", "for FSDP's actor"),
        ("entropy_from_logits_with_chunking freeze_vision_tower", "for FSDP's actor"),
        ("profiler.* profile.*", _NO_PROFILER),
    ],
    "actor_rollout_ref.actor.optim.": [
        ("lr_warmup_init min_lr", "warm-up starts from 0 and the rate does not decay", (None, 0)),
        ("lr_decay_style", "the rate does not decay", (None, "constant")),
        ("weight_decay_incr_style", "the weight decay is constant", (None, "constant")),
        ("optimizer", "the optimizer is Adam", ("adam",)),
        ("override_optimizer_config", "there are no further settings of the optimizer", _EMPTY),
        ("override_optimizer_config.*", "there are no further settings of the optimizer", ()),
        ("use_checkpoint_opt_param_scheduler", "the schedule follows from the step", _OFF),
        ("total_training_steps lr_decay_steps lr_wsd_*", "the rate is constant after warm-up"),
    ],
    "actor_rollout_ref.actor.megatron.": [
        ("*_offload", "nothing is offloaded: " + _SEPARATE),
        ("use_dist_checkpointing", "the model starts from HF weights", _OFF),
        ("dist_checkpointing_*", "the model starts from HF weights"),
        ("use_mbridge vanilla_mbridge", "weights are converted by mbridge", (True,)),
        ("use_remove_padding", _MICRO),
        ("forward_only", "the actor is trained", _OFF),
        ("override_ddp_config override_mcore_model_config", "not supported", _EMPTY),
        ("override_ddp_config.* override_mcore_model_config.*", "not supported", ()),
        ("seed", "see trainer.seed"),
    ],
    "actor_rollout_ref.rollout.": [
        ("mode", "the engine runs by itself"),
        ("prompt_length", "see data.max_prompt_length"),
        ("response_length", "see data.max_response_length"),
        ("max_model_len", "it is data.max_prompt_length + data.max_response_length"),
        ("calculate_log_probs", "the engine's log-probs are always recorded"),
        ("logprobs_mode", "of the distribution sampled from", ("processed_logprobs",)),
        ("log_prob_*", "log-probs are computed in the trainer's micro-batches"),
        ("ignore_eos", "responses end at the end token", _OFF),
        ("do_sample", "the actor's rollouts are sampled", (True,)),
        ("val_kwargs.do_sample", "val_kwargs.temperature decides: 0 is greedy"),
        ("data_parallel_size", "use launch.rollout_workers", (None, 1)),
        ("expert_parallel_size pipeline_model_parallel_size", "not supported", (None, 1)),
        ("over_sample_rate", "each plan names its samples", (None, 0)),
        ("skip_rollout", "see router_replay.replay_file", _OFF),
        ("quantization quantization_config_file", "quantized rollouts are not supported", _NONE),
        ("engine_kwargs engine_kwargs.vllm", "the engine gets no further arguments", _EMPTY),
        ("engine_kwargs.vllm.*", "the engine gets no further arguments", ()),
        ("engine_kwargs.*", "for another engine"),
        ("multi_turn.enable", _SINGLE_TURN, _OFF),
        ("multi_turn.* agent.*", _SINGLE_TURN),
        ("mtp", "multi-token prediction is not supported", _NONE),
        ("load_format checkpoint_engine.* update_weights_*", "weights come through the store"),
        ("layer_name_map.*", "weights come through the store"),
        ("free_cache_engine multi_stage_wake_up", _SEPARATE),
        ("enable_chunked_prefill enable_prefix_caching scheduling_policy", _NO_CUT),
        ("cudagraph_capture_sizes disable_log_stats skip_tokenizer_init", _NO_CUT),
        ("skip_dump_dir trace.* prometheus.*", "see the run's report"),
        ("profiler.*", _NO_PROFILER),
    ],
    "algorithm.": [
        ("use_kl_in_reward", "use actor_rollout_ref.actor.use_kl_loss", _OFF),
        ("use_pf_ppo", _GRPO_ONLY, _OFF),
        ("gamma lam kl_penalty kl_ctrl.* pf_ppo.*", _GRPO_ONLY),
        ("rollout_correction.rollout_rs", "samples are not rejected by their weight", _NONE),
        ("rollout_correction.rollout_rs_threshold", "samples are not rejected by their weight"),
        ("rollout_correction.bypass_mode", "old log-probs are the trainer's own", _OFF),
        ("rollout_correction.loss_type", "for bypass_mode", ("ppo_clip",)),
        ("rollout_correction.rollout_is_batch_normalize", "weights are truncated only", _OFF),
    ],
    "custom_reward_function.": [
        ("reward_kwargs", "put constants into the reward file", _EMPTY),
        ("reward_kwargs.*", "put constants into the reward file", ()),
    ],
    "critic.": [
        ("enable", "GRPO has no critic", _OFF),
        ("*", "GRPO has no critic"),
    ],
    "trainer.": [
        ("project_name", "the run's name is experiment_name"),
        ("resume_mode", "the same experiment_name resumes; another starts anew", ("auto",)),
        ("resume_from_path default_hdfs_dir", "the run's state lies in store.uri", _NONE),
        ("val_only", "use val_before_train with a run of its own", _OFF),
        ("max_*_ckpt_to_keep del_local_ckpt_after_load", "the store keeps what a restart needs"),
        (
            "rollout_data_dir validation_data_dir log_val_generations",
            "all samples are in the store",
        ),
        ("critic_warmup", "GRPO has no critic"),
        ("balance_batch", "every rank has the same number of micro-batches"),
        ("device", "workers use what they find"),
        ("ray_* esi_redundant_time use_legacy_worker_impl", "Ray is not used"),
    ],
    "reward_model.": [
        ("enable", "rewards come from custom_reward_function", _OFF),
        ("reward_manager", "rewards come from custom_reward_function", ("naive",)),
        ("*", "rewards come from custom_reward_function"),
    ],
    "reward_manager.": [
        ("source", "rewards come from custom_reward_function", ("register",)),
        ("name", "rewards come from custom_reward_function", ("naive",)),
        ("module.path", "rewards come from custom_reward_function", _NONE),
        ("*", "rewards come from custom_reward_function"),
    ],
    "reward.": [
        ("reward_model.enable", "rewards come from custom_reward_function", _OFF),
        ("reward_model.*", "rewards come from custom_reward_function"),
        ("reward_manager.source", "rewards come from custom_reward_function", ("register",)),
        ("reward_manager.name", "rewards come from custom_reward_function", ("naive",)),
        ("reward_manager.module.path", "rewards come from custom_reward_function", _NONE),
        ("reward_manager.module.name", "rewards come from custom_reward_function"),
        ("num_workers", "rewards are computed in the rollout workers"),
        ("reward_kwargs", "put constants into the reward file", _EMPTY),
        ("reward_kwargs.*", "put constants into the reward file", ()),
    ],
    "": [
        ("global_profiler.*", _NO_PROFILER),
        ("ray_kwargs.* ray_init.* transfer_queue.*", "Ray is not used"),
    ],
}

FOREIGN = _table()
"""In the order of matching: entries for single keys come before those for their group."""
