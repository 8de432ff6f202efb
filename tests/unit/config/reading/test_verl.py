"""verl's settings that Retrace does not have: none that changes a run's numbers is ignored."""

import re

import pytest

from pipeline.config.keys import all_keys
from pipeline.config.reading.hints import EMPTY_HINTS, HINTS, NEAREST, REFUSED_VALUES
from pipeline.config.reading.verl import Foreign, find_foreign, foreign_settings
from tests.unit.config.settings import (
    ACTOR,
    MINIMAL,
    OVERRIDE,
    REPLAY,
    ROLLOUT,
    load,
    load_error,
    notes,
)

CONFIG = "actor_rollout_ref.model.override_config"
REF_OVERRIDE = "actor_rollout_ref.ref.megatron.override_transformer_config"
ENTRIES = foreign_settings()


def name(entry: Foreign) -> str:
    return entry.pattern


def test_the_tables_hide_no_setting_of_ours():
    assert [key for key in all_keys() if find_foreign(key)] == []
    assert {*HINTS, *EMPTY_HINTS, *REFUSED_VALUES, *NEAREST} <= set(all_keys())
    assert find_foreign(f"{ACTOR}.nonsense") is None


def test_every_entry_can_match():
    """An entry could never match if an earlier entry had a broader pattern."""
    for entry in ENTRIES:
        assert find_foreign(entry.pattern.replace("*", "zzz")) is entry, entry.pattern


def test_no_ignored_setting_is_named_after_a_number():
    """The exceptions are read only if another setting is on, which is refused, or name sizes."""
    numbers = (
        "loss|coef|clip|lr_|betas|decay|momentum|temperature|top_p|top_k|penalty|gamma|lam|threshold|"
        "epochs|batch_size|max_samples|truncation|length|rollout_is|rollout_rs|adv_|estimator|kl_|"
        "warmup|template|quant|mtp|lora|override_config"
    )
    found = {
        entry.pattern
        for entry in ENTRIES
        if entry.ignored and re.search(numbers, entry.pattern.replace("log_prob", ""))
    }
    assert found == {
        "actor_rollout_ref.actor.grad_clip",
        "actor_rollout_ref.actor.policy_loss.dro_beta",
        "actor_rollout_ref.actor.policy_loss.rollout_correction.*",
        "actor_rollout_ref.model.lora.*",
        "actor_rollout_ref.model.lora_alpha",
        "actor_rollout_ref.model.mtp.*",
        "actor_rollout_ref.rollout.mtp.*",
        "algorithm.rollout_is_*",
        "critic.grad_clip",
        "data.val_batch_size",
    }


@pytest.mark.parametrize("entry", [one for one in ENTRIES if not one.ignored], ids=name)
def test_other_values_are_refused_with_the_reason(tmp_path, entry):
    if entry.agrees is not None:
        return
    key = entry.pattern.replace("*", "zzz")
    assert all(entry.accepts(key, value) for value in (*entry.harmless, None, {}))
    (problem,) = load_error(tmp_path, f"{key}=other")
    assert problem == f"{key}: found 'other'; {entry.refusal}"
    assert entry.reason in entry.refusal


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        (f"{ACTOR}.rollout_n", "8", "5"),
        ("actor_rollout_ref.ref.megatron.dtype", "bfloat16", "float32"),
        (f"{REF_OVERRIDE}.moe_router_dtype", "fp32", "fp64"),
        (f"{ROLLOUT}.prompt_length", "512", "256"),
        (f"{ROLLOUT}.response_length", "512", "256"),
        (f"{ROLLOUT}.max_model_len", "1024", "1023"),
        (f"{CONFIG}.max_position_embeddings", "1024", "1023"),
        (f"{ROLLOUT}.calculate_log_probs", "True", "False"),
        (f"{ROLLOUT}.val_kwargs.do_sample", "True", "False"),
        (f"{ACTOR}.optim.min_lr_ratio", "0.5", "0.25"),
        ("critic.optim.min_lr_ratio", "0.5", "0.25"),
        (f"{ACTOR}.optim.lr_scheduler_type", "cosine", "constant"),
        ("critic.optim.warmup_style", "cosine", "constant"),
        ("actor_rollout_ref.ref.megatron.use_dist_checkpointing", "False", "True"),
        ("reward.reward_kwargs.max_resp_len", "512", "256"),
        ("critic.enable", "True", "False"),
        ("critic.rollout_n", "8", "5"),
        ("critic.model.path", "model", "other"),
        ("critic.megatron.context_parallel_size", "1", "2"),
        ("critic.megatron.dtype", "bfloat16", "float32"),
        ("critic.megatron.override_transformer_config.moe_router_dtype", "fp32", "fp64"),
    ],
)
def test_settings_written_elsewhere_must_agree(tmp_path, key, good, bad):
    others = (
        f"{ACTOR}.use_kl_loss=True",
        f"{OVERRIDE}.moe_router_dtype=fp32",
        "algorithm.rollout_correction.rollout_is=token",
        f"{ROLLOUT}.val_kwargs.temperature=0.6",
        "algorithm.adv_estimator=gae",
        *(
            f"{optim}.{setting}"
            for optim in (f"{ACTOR}.optim", "critic.optim")
            for setting in ("lr=2e-6", "min_lr=1e-6", "lr_decay_style=cosine")
        ),
    )
    entry = find_foreign(key)
    assert entry.agrees is not None
    assert load(tmp_path, *others, f"{key}={good}").notes
    (problem,) = load_error(tmp_path, *others, f"{key}={bad}")
    assert problem.startswith(f"{key}: found ")
    assert problem.endswith(entry.refusal)


@pytest.mark.parametrize("key", [f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"])
@pytest.mark.parametrize("setting", ["use_dist_checkpointing", "override_transformer_config.x"])
def test_the_references_settings_count_only_if_it_exists(tmp_path, key, setting):
    written = f"actor_rollout_ref.ref.megatron.{setting}=True"
    assert load(tmp_path, written).notes
    (problem,) = load_error(tmp_path, written, f"{key}=True")
    assert problem.startswith(written.removesuffix("=True"))


def test_the_reference_may_round_differently(tmp_path):
    written = f"{REF_OVERRIDE}.recompute_granularity=full"
    assert load(tmp_path, written, f"{ACTOR}.use_kl_loss=True").notes


def test_accepted_settings_are_noted(tmp_path):
    assert notes(tmp_path, f"{REPLAY}._target_=x", "actor_rollout_ref.hybrid_engine=True") == [
        "actor_rollout_ref.actor.router_replay._target_, actor_rollout_ref.hybrid_engine: not "
        "taken over; Retrace has no such setting"
    ]
    assert notes(tmp_path, "trainer.resume_mode=auto") == [
        "trainer.resume_mode: ignored; the same experiment_name resumes a run; a new name starts "
        "one"
    ]
    found = notes(tmp_path, *(f"global_profiler.{one}=1" for one in "abcd"))
    assert found == ["global_profiler.a and 3 more: not taken over; Retrace has no such setting"]


def test_false_is_not_0(tmp_path):
    (problem,) = load_error(tmp_path, "reward_model.enable=0")
    assert problem.startswith("reward_model.enable: found 0; rewards come from")


def test_the_new_name_of_the_reward_function_is_accepted(tmp_path):
    """In newer versions of verl, custom_reward_function is under reward."""
    text = MINIMAL.replace("custom_reward_function: {path: reward.py}", "")
    loaded = load(tmp_path, "reward.custom_reward_function.path=reward.py", text=text)
    assert loaded.config == load(tmp_path).config


def test_a_reward_function_without_a_path_does_not_count(tmp_path):
    """verl's own files contain {path: null, name: compute_score}."""
    loaded = load(tmp_path, "custom_reward_function={path: null, name: compute_score}")
    assert loaded.config.custom_reward_function is None


@pytest.mark.parametrize("more", [[], [f"{ACTOR}.ppo_micro_batch_size_per_gpu=null"]])
def test_micro_batches_may_be_split_by_token_count(tmp_path, more):
    dynamic = (f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
    actor = load(tmp_path, *dynamic, *more).config.actor_rollout_ref.actor
    assert actor.use_dynamic_bsz
    assert actor.ppo_max_token_len_per_gpu == 16384
