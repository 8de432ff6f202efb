"""In a verl user's file, settings without a meaning in Retrace produce a note. Settings that would
change the run are refused, and the error gives the reason."""

import pytest

from pipeline.config.keys import all_keys
from pipeline.config.reading.hints import EMPTY_HINTS, HINTS, NEAREST, REFUSED_VALUES
from pipeline.config.reading.verl import FOREIGN, find_foreign
from tests.unit.config.settings import (
    ACTOR,
    MINIMAL,
    REPLAY,
    load,
    load_error,
    notes,
)

PUBLISHED_R2_EXAMPLE = """
algorithm.adv_estimator=grpo
data.train_files=train.parquet
data.val_files=test.parquet
data.train_batch_size=8
data.max_prompt_length=1024
data.max_response_length=1024
data.filter_overlong_prompts=True
data.truncation=error
actor_rollout_ref.model.use_fused_kernels=True
actor_rollout_ref.model.path=model
actor_rollout_ref.actor.use_dynamic_bsz=True
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096
actor_rollout_ref.actor.router_replay.mode=R2
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_enable_deepep=True
+actor_rollout_ref.actor.megatron.override_transformer_config.moe_router_dtype=fp32
+actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full
actor_rollout_ref.actor.megatron.param_offload=True
actor_rollout_ref.actor.megatron.optimizer_offload=True
actor_rollout_ref.actor.megatron.grad_offload=True
actor_rollout_ref.actor.optim.lr=1e-6
actor_rollout_ref.actor.ppo_mini_batch_size=8
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3
actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=1
actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2
actor_rollout_ref.actor.megatron.expert_model_parallel_size=8
actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1
actor_rollout_ref.actor.use_kl_loss=False
actor_rollout_ref.actor.kl_loss_coef=0.001
actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0
actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096
actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True
actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=3
actor_rollout_ref.rollout.tensor_model_parallel_size=2
actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.rollout.mode=async
actor_rollout_ref.actor.megatron.use_mbridge=True
actor_rollout_ref.rollout.gpu_memory_utilization=0.65
actor_rollout_ref.rollout.n=8
actor_rollout_ref.rollout.enable_chunked_prefill=True
actor_rollout_ref.rollout.max_num_batched_tokens=2048
actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=3
actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2
actor_rollout_ref.ref.megatron.param_offload=True
algorithm.use_kl_in_reward=False
trainer.critic_warmup=0
trainer.logger=['console']
trainer.project_name=verl_grpo_example_gsm8k_math
trainer.nnodes=1
trainer.n_gpus_per_node=8
trainer.test_freq=10
trainer.total_training_steps=50000
trainer.balance_batch=False
trainer.val_before_train=False
"""
"""The settings in verl's examples/router_replay/run_qwen30_a3b_megatron_vllm.sh, except the names
that a user chooses."""


def test_published_example_loads(tmp_path):
    loaded = load(tmp_path, *PUBLISHED_R2_EXAMPLE.split())
    assert loaded.config.actor_rollout_ref.actor.router_replay.mode == "R2"
    assert loaded.config.trainer.n_gpus_per_node == 8
    assert loaded.config.trainer.project_name == "verl_grpo_example_gsm8k_math"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("trainer.default_hdfs_dir=x", "the run's state is in store.uri"),
        ("actor_rollout_ref.hybrid_engine=True", "rollout and training are separate processes"),
        ("actor_rollout_ref.rollout.mode=async", "engines are separate processes"),
        (
            "actor_rollout_ref.ref.megatron.grad_offload=True",
            "the reference has no gradients and no optimizer",
        ),
        ("actor_rollout_ref.rollout.calculate_log_probs=True", "always recorded"),
        ("critic.model.path=x", "the critic starts from the actor's weights"),
        ("critic.megatron.tensor_model_parallel_size=4", "the same layout and ranks as the actor"),
        (f"{REPLAY}._target_=x", "Hydra"),
    ],
)
def test_harmless_settings_are_noted(tmp_path, setting, reason):
    (note,) = notes(tmp_path, setting)
    assert note.startswith(f"{setting.split('=')[0]}: ignored; ")
    assert reason in note


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("critic.enable=True", "critic.enable: found True; only algorithm.adv_estimator=gae uses a "
         "critic; change algorithm.adv_estimator, or leave the key out"),
        # 0 is not False; accepting it would hide a mistake.
        (
            "reward_model.enable=0",
            "reward_model.enable: found 0; rewards come from custom_reward_function or from the "
            "built-in scorers; write False or leave the key out",
        ),
    ],
)  # fmt: skip
def test_settings_that_would_change_the_run_are_refused(tmp_path, setting, message):
    assert load_error(tmp_path, setting) == (message,)


def test_settings_with_the_same_reason_share_one_note(tmp_path):
    found = notes(tmp_path, *(f"global_profiler.{name}=1" for name in ("a", "b", "c", "d")))
    assert found == ["global_profiler.a and 3 more: ignored; Retrace has no profiler"]


def test_the_new_name_of_the_reward_function_is_accepted(tmp_path):
    """In newer versions of verl, custom_reward_function is under reward."""
    text = MINIMAL.replace("custom_reward_function: {path: reward.py}", "")
    loaded = load(tmp_path, "reward.custom_reward_function.path=reward.py", text=text)
    assert loaded.config == load(tmp_path).config


def test_a_reward_function_without_a_path_does_not_count(tmp_path):
    """verl's own files contain {path: null, name: compute_score}."""
    loaded = load(tmp_path, "custom_reward_function={path: null, name: compute_score}")
    assert loaded.config.custom_reward_function is None


def test_the_table_hides_no_setting_of_ours():
    assert [key for key in all_keys() if find_foreign(key)] == []
    assert {*HINTS, *EMPTY_HINTS, *REFUSED_VALUES, *NEAREST} <= set(all_keys())
    assert find_foreign(f"{ACTOR}.nonsense") is None


def test_every_entry_of_the_table_can_match():
    """An entry could never match if an earlier entry had a broader pattern."""
    for entry in FOREIGN:
        example = entry.pattern.replace("*", "zzz")
        assert find_foreign(example) is entry, entry.pattern


class TestDynamicBatches:
    DYNAMIC = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")

    def test_micro_batches_are_split_by_token_count(self, tmp_path):
        for more in ([], [f"{ACTOR}.ppo_micro_batch_size_per_gpu=null"]):
            actor = load(tmp_path, *self.DYNAMIC, *more).config.actor_rollout_ref.actor
            assert actor.use_dynamic_bsz
            assert actor.ppo_max_token_len_per_gpu == 16384
            assert actor.megatron.use_remove_padding
