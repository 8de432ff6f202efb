"""verl's settings that are not ours: which are accepted without effect, which are refused, and why.

Users of verl can use their files. A setting without meaning here is accepted with a note; one that
would make the run differ from what the user asked for is refused with the reason.
"""

from fnmatch import fnmatchcase

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
from pipeline.config.reading.foreign import Foreign, same_value
from pipeline.config.reading.verl_critic import CRITIC
from pipeline.config.reading.verl_policy import POLICY

ALIASES = {
    "actor_rollout_ref.actor.megatron.router_replay": "actor_rollout_ref.actor.router_replay",
    "reward.custom_reward_function": "custom_reward_function",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.overlong_buffer": "reward.reward_kwargs.overlong_buffer_cfg",
}
"""Other spellings of a group, and ours. Two spellings with different values are an error."""

_NO_HALF = "float16 would need its losses scaled, which is not supported; write bfloat16"

HINTS = {
    "actor_rollout_ref.actor.strategy": "FSDP is not supported: routing is replayed in "
    "Megatron-core; write megatron, or leave the key out",
    "actor_rollout_ref.rollout.name": "only vLLM is supported so far; write vllm, or leave the "
    "key out",
    "actor_rollout_ref.rollout.dtype": _NO_HALF,
    "actor_rollout_ref.actor.megatron.dtype": _NO_HALF,
    "actor_rollout_ref.actor.optim.lr_warmup_steps": "write 0 for no warm-up",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "verl asks for it too: write 1 or "
    "more, as many samples as fit at once",
    "algorithm.rollout_correction.rollout_is": "write token, sequence, geometric or null",
    "trainer.device": "only NVIDIA's GPUs and CPUs are supported; write auto",
    "trainer.logger": "write some of console, tensorboard, file, wandb, mlflow, swanlab, trackio",
    "trainer.total_training_steps": "write the number of steps of the run",
}
"""The fix for a value that verl accepts and we do not, by key."""

EMPTY_HINTS = {"trainer.experiment_name": "write a name, such as my-run"}
"""The fix where a text is empty or null, by key."""

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
"""What people call what has another name here, where another name looks nearer, by key."""

_ESTIMATOR = "algorithm.adv_estimator"
_PATH = "actor_rollout_ref.model.path"

_DATALOADER = "prompts are staged into the store once, not loaded by a data loader"
_GRPO_ONLY = "GRPO does not use it"
_NO_DISTILLATION = "distillation is not supported"
_NO_PROFILER = "there is no profiler here"
_NO_RAY = "Ray is not used"
_NO_TEMPLATE_ARGUMENTS = "the chat template gets no further arguments"
_ONE_REWARD = "rewards come from custom_reward_function, or from scorers of data sources"
_EACH_SAMPLE = "each sample is scored by itself, in processes beside the engine"
_MANAGERS = ("naive", "dapo", "prime")
_PARQUET = "prompts are Parquet files"
_SYNCHRONOUS = "steps follow each other; trainer.max_staleness=1 overlaps rollout and training"

_DATA = with_prefix(
    "data",
    same("train_max_samples val_max_samples", "all prompts are used; make a smaller file", -1),
    same("tokenizer", "the tokenizer is the model's"),
    unread("trust_remote_code", "code that comes with a model is never run", _PATH),
    same("custom_cls.* sampler.* datagen.* *tool_config_path function_tool_path", _PARQUET),
    refused("apply_chat_template_kwargs apply_chat_template_kwargs.*", _NO_TEMPLATE_ARGUMENTS),
    off("continuous_token.enable", "rollouts have one turn"),
    unread("continuous_token.*", "rollouts have one turn", "data.continuous_token.enable"),
    unread("image_* video_* audio_* mm_processor_kwargs*", "models are of text alone", _PATH),
    unread("return_multi_modal_inputs", "models are of text alone", _PATH),
    speed("return_raw_* return_full_prompt", _DATALOADER),
    speed("use_shm dataloader_num_workers filter_overlong_prompts_workers", _DATALOADER),
    speed("val_batch_size validation_shuffle", "a validation takes all its prompts at once"),
)

_ALGORITHM = with_prefix(
    "algorithm",
    off("use_pf_ppo", _GRPO_ONLY),
    unread("pf_ppo.*", _GRPO_ONLY, "algorithm.use_pf_ppo"),
    speed("filter_groups.max_inflight_gen_batches", "as many as the step surely needs"),
    same(
        "rollout_correction.rollout_is_threshold_lower",
        "write both in rollout_is_threshold, such as 0.5_5.0",
    ),
    same(
        "rollout_correction.rollout_rs_threshold_lower",
        "write both in rollout_rs_threshold, such as 0.5_2.0",
    ),
    off("rollout_correction.use_policy_gradient", "write bypass_mode and loss_type=reinforce"),
    off("rollout_is", "use algorithm.rollout_correction.rollout_is"),
    same("rollout_is_threshold", "use algorithm.rollout_correction.rollout_is_threshold"),
    unread("rollout_is_*", "use algorithm.rollout_correction", "algorithm.rollout_is"),
)

_TRAINER = with_prefix(
    "trainer",
    same("resume_mode", "the same experiment_name resumes; another starts anew", "auto"),
    same("resume_from_path", "the run's state lies in store.uri"),
    records("default_hdfs_dir", "the run's state lies in store.uri"),
    off("val_only", "use val_before_train with a run of its own"),
    records(
        "max_*_ckpt_to_keep del_local_ckpt_after_load esi_redundant_time",
        "the store keeps what a restart needs",
    ),
    records(
        "rollout_data_dir validation_data_dir log_val_generations", "all samples are in the store"
    ),
    seeds("balance_batch", "ranks get samples of a mini-batch by trainer.seed, not by length"),
    speed("ray_* use_legacy_worker_impl use_v1", _NO_RAY),
    same("v1.trainer_mode", _SYNCHRONOUS, "sync"),
    same("v1.sampler.custom_sampler.path", _PARQUET),
    unread("v1.*", _SYNCHRONOUS, "trainer.v1.trainer_mode"),
)

_REWARD = [
    *refused(
        "custom_reward_function.reward_kwargs custom_reward_function.reward_kwargs.*",
        "put constants into the reward file",
    ),
    *with_prefix(
        "reward_model",
        off("enable", _ONE_REWARD),
        same("reward_manager", _EACH_SAMPLE, *_MANAGERS),
        unread("*", _ONE_REWARD, "reward_model.enable"),
    ),
    *with_prefix(
        "reward_manager",
        same("source", _ONE_REWARD, "register"),
        same("name", _EACH_SAMPLE, *_MANAGERS),
        same("module.path", _ONE_REWARD),
        unread("*", _ONE_REWARD, "reward_manager.source"),
    ),
    *with_prefix(
        "reward",
        off("reward_model.enable", _ONE_REWARD),
        unread("reward_model.*", _ONE_REWARD, "reward.reward_model.enable"),
        same("reward_manager.source", _ONE_REWARD, "register"),
        same("reward_manager.name", _EACH_SAMPLE, *_MANAGERS),
        same("reward_manager.module.path", _ONE_REWARD),
        unread("reward_manager.module.name", _ONE_REWARD, "reward.reward_manager.source"),
        same("sandbox_fusion.url", _ONE_REWARD),
        unread("sandbox_fusion.*", _ONE_REWARD, "reward.sandbox_fusion.url"),
        elsewhere(
            "reward_kwargs.max_resp_len",
            "it is data.max_response_length",
            same_value("data.max_response_length"),
        ),
        records(
            "reward_kwargs.overlong_buffer_cfg.log", "the penalty is always stored with the sample"
        ),
    ),
    *same("*sandbox_fusion.url", "code is not run in a sandbox of its own"),
    *unread("*sandbox_fusion.*", "code is not run in a sandbox", "sandbox_fusion.url"),
]

FOREIGN: Entries = [
    *records("*_target_", "Hydra's marker of classes means nothing here"),
    *records("hydra.*", "Hydra is not used"),
    *refused(
        "defaults", "Hydra's list of other files: `retrace import-verl` makes one file of all"
    ),
    *same("model_engine", "training is done by Megatron-core", "megatron"),
    *_DATA,
    *POLICY,
    *_ALGORITHM,
    *CRITIC,
    *_TRAINER,
    *_REWARD,
    *records("global_profiler.*", _NO_PROFILER),
    *speed("ray_kwargs.* ray_init.* transfer_queue.*", _NO_RAY),
    *off("distillation.enabled", _NO_DISTILLATION),
    *unread("distillation.*", _NO_DISTILLATION, "distillation.enabled"),
    *off("skip.*.enable", "see actor_rollout_ref.actor.router_replay.replay_file"),
    *unread("skip.*", "see skip.rollout.enable", "skip.rollout.enable"),
]
"""In the order of matching: entries for single keys come before those for their group."""


def find_foreign(key: str) -> Foreign | None:
    """The first entry of the table that matches a key of verl; None: not in the table."""
    return next((entry for entry in FOREIGN if _matches(key, entry.pattern)), None)


def _matches(key: str, pattern: str) -> bool:
    # "critic.*" also matches an empty or null "critic".
    return fnmatchcase(key, pattern) or pattern == f"{key}.*"
