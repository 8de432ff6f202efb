"""verl's settings that Retrace does not have: which are ignored, which are refused, and why.

Users can therefore keep the settings files that they wrote for verl. A setting that has no meaning
here is ignored with a note. A setting is refused, with the reason, if the run would not do what the
setting asks for.
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
"""Our spelling of each group, keyed by another accepted spelling.

A file that sets both spellings to different values is refused.
"""

_ESTIMATOR = "algorithm.adv_estimator"
_PATH = "actor_rollout_ref.model.path"

_DATALOADER = "prompts are staged into the store once, not loaded by a data loader"
_GRPO_ONLY = "PF-PPO is not supported"
_NO_DISTILLATION = "distillation is not supported"
_NO_PROFILER = "Retrace has no profiler"
_NO_RAY = "Ray is not used"
_ONE_REWARD = "rewards come from custom_reward_function or from the built-in scorers"
_EACH_SAMPLE = "each sample is scored separately, in processes next to the engine"
_MANAGERS = ("naive", "dapo", "prime")
_PARQUET = "prompts are read from Parquet files, without custom classes or tools"
_SYNCHRONOUS = "steps run one after another; trainer.max_staleness=1 overlaps rollout and training"

_DATA = with_prefix(
    "data",
    same(
        "train_max_samples val_max_samples",
        "all prompts of the files are used; for fewer prompts, write a smaller file",
        -1,
    ),
    same("tokenizer", "the model's own tokenizer is used"),
    unread("trust_remote_code", "a model's own code is never run", _PATH),
    same("custom_cls.* sampler.* datagen.* *tool_config_path function_tool_path", _PARQUET),
    off("continuous_token.enable", "rollouts have one turn"),
    unread("continuous_token.*", "rollouts have one turn", "data.continuous_token.enable"),
    unread("image_* video_* audio_* mm_processor_kwargs*", "only text models are supported", _PATH),
    unread("return_multi_modal_inputs", "only text models are supported", _PATH),
    speed("return_raw_* return_full_prompt", _DATALOADER),
    speed("use_shm dataloader_num_workers filter_overlong_prompts_workers", _DATALOADER),
    speed(
        "val_batch_size validation_shuffle",
        "each validation generates the responses to all its prompts together",
    ),
)

_ALGORITHM = with_prefix(
    "algorithm",
    unread("gdpo_reward_*", "used only by an estimator that is not supported", _ESTIMATOR),
    off("use_pf_ppo", _GRPO_ONLY),
    unread("pf_ppo.*", _GRPO_ONLY, "algorithm.use_pf_ppo"),
    speed(
        "filter_groups.max_inflight_gen_batches",
        "a step generates, at the same time, all batches that it is certain to need",
    ),
    same(
        "rollout_correction.rollout_is_threshold_lower",
        "give both bounds in rollout_is_threshold, such as 0.5_5.0",
    ),
    same(
        "rollout_correction.rollout_rs_threshold_lower",
        "give both bounds in rollout_rs_threshold, such as 0.5_2.0",
    ),
    off(
        "rollout_correction.use_policy_gradient",
        "the equivalent is rollout_correction.bypass_mode=True with loss_type=reinforce",
    ),
    off("rollout_is", "use algorithm.rollout_correction.rollout_is"),
    same("rollout_is_threshold", "use algorithm.rollout_correction.rollout_is_threshold"),
    unread("rollout_is_*", "use algorithm.rollout_correction", "algorithm.rollout_is"),
)

_TRAINER = with_prefix(
    "trainer",
    same("resume_mode", "the same experiment_name resumes a run; a new name starts one", "auto"),
    same("resume_from_path", "the run's state is in store.uri"),
    records("default_hdfs_dir", "the run's state is in store.uri"),
    off("val_only", "use val_before_train in a separate run"),
    records(
        "max_*_ckpt_to_keep del_local_ckpt_after_load esi_redundant_time",
        "the store keeps everything that a restart needs",
    ),
    records(
        "rollout_data_dir validation_data_dir log_val_generations", "all samples are in the store"
    ),
    seeds(
        "balance_batch",
        "the assignment of a mini-batch's samples to ranks depends on trainer.seed, not on length",
    ),
    speed("ray_* use_legacy_worker_impl use_v1", _NO_RAY),
    same("v1.trainer_mode", _SYNCHRONOUS, "sync"),
    same("v1.sampler.custom_sampler.path", _PARQUET),
    unread("v1.*", _SYNCHRONOUS, "trainer.v1.trainer_mode"),
)

_REWARD = [
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
            "data.max_response_length determines this value",
            same_value("data.max_response_length"),
        ),
        records(
            "reward_kwargs.overlong_buffer_cfg.log", "the penalty is always stored with the sample"
        ),
    ),
    *same("*sandbox_fusion.url", "code is not run in a separate sandbox"),
    *unread("*sandbox_fusion.*", "code is not run in a separate sandbox", "sandbox_fusion.url"),
]

FOREIGN: Entries = [
    *records("*_target_", "Hydra's class marker has no effect here"),
    *records("hydra.*", "Hydra is not used"),
    *refused(
        "defaults",
        "Hydra's list of other files is not read; `retrace import-verl` combines the files",
    ),
    *same("model_engine", "Megatron-core does the training", "megatron"),
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
    *unread(
        "skip.*", "see actor_rollout_ref.actor.router_replay.replay_file", "skip.rollout.enable"
    ),
]
"""The table of verl's settings.

The first entry that matches applies, so entries for single keys precede those for their group.
"""


def find_foreign(key: str) -> Foreign | None:
    """Return the first entry of FOREIGN that matches one of verl's keys, or None."""
    return next((entry for entry in FOREIGN if _matches(key, entry.pattern)), None)


def _matches(key: str, pattern: str) -> bool:
    # "critic.*" also matches an empty or null "critic".
    return fnmatchcase(key, pattern) or pattern == f"{key}.*"
