"""Real jobs of verl: which settings are mapped, refused with a reason, or not taken over."""

import re
from typing import Any

import pytest
import yaml

from pipeline.config.dotted import get
from pipeline.config.imports.job import import_verl
from pipeline.config.reading.load import load_config
from pipeline.config.reading.read import read_override
from pipeline.errors import InputError
from tests.verl_jobs import PAGE, jobs, needs_verl, render, write_script

ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
FIELDS = f"{ACTOR}.megatron.override_transformer_config"
EXPECTED: dict[str, tuple[dict[str, Any], dict[str, str], set[str]]] = {
    "examples/router_replay/run_qwen3_30b_a3b_megatron.sh": (
        {
            f"{ACTOR}.router_replay.mode": "R3",  # written under actor.megatron
            f"{ACTOR}.ppo_mini_batch_size": 3,
            f"{ACTOR}.megatron.expert_model_parallel_size": 8,
            f"{FIELDS}.moe_token_dispatcher_type": "flex",
            f"{ROLLOUT}.enable_rollout_routing_replay": True,
            "trainer.nnodes": 6,
            "algorithm.adv_estimator": "grpo",
        },
        {},
        {
            f"{ACTOR}.megatron.use_mbridge",
            f"{REF}.megatron.expert_model_parallel_size",
            f"{ROLLOUT}.enable_chunked_prefill",
            "trainer.balance_batch",
        },
    ),
    "examples/grpo_trainer/run_deepseek_v3_671b_megatron.sh": (
        {
            f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload": True,
            f"{ACTOR}.clip_ratio_high": 0.28,
            f"{ACTOR}.kl_loss_type": "low_var_kl",
            f"{FIELDS}.num_layers_in_last_pipeline_stage": 6,
            f"{ROLLOUT}.val_kwargs.top_p": 0.7,
            "reward.reward_kwargs.overlong_buffer_cfg.len": 4096,
            "trainer.total_epochs": 10,
        },
        {},
        {
            "reward.reward_kwargs.overlong_buffer_cfg.log",
            "trainer.log_val_generations",
            "actor_rollout_ref.nccl_timeout",
        },
    ),
    "examples/grpo_trainer/run_moonlight_16b_a3b_megatron.sh": (
        {f"{ROLLOUT}.n": 5, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 16},
        {
            f"{ACTOR}.megatron.use_dist_checkpointing": "training starts from the Hugging Face",
            f"{REF}.megatron.use_dist_checkpointing": "the reference is policy 0",
        },
        {f"{ACTOR}.megatron.dist_checkpointing_path", "data.trust_remote_code"},
    ),
    "examples/ppo_trainer/run_qwen3_8b_megatron.sh": (
        {
            "algorithm.adv_estimator": "gae",
            "critic.optim.lr": 1e-5,
            "critic.ppo_max_token_len_per_gpu": 24576,
            f"{ACTOR}.use_dynamic_bsz": True,
        },
        {},
        {"critic.model.use_remove_padding"},
    ),
    "examples/tuning/lora/run_qwen3_30b_a3b_megatron.sh": (
        {f"{ACTOR}.megatron.context_parallel_size": 2, f"{ROLLOUT}.enforce_eager": True},
        {"actor_rollout_ref.model.lora.rank": "adapters are not supported; all weights are"},
        {"actor_rollout_ref.model.lora.alpha", f"{ROLLOUT}.free_cache_engine"},
    ),
    "recipe/dapo/test_dapo_qwen3_moe_30b_megatron_fp16.sh": (
        {
            "data.prompt_key": "prompt",
            "data.truncation": "left",
            f"{ACTOR}.clip_ratio_c": 10.0,
            "trainer.save_freq": -1,
            "trainer.n_gpus_per_node": 8,
        },
        {
            f"{ACTOR}.megatron.dtype": "float16 requires loss scaling",
            f"{ROLLOUT}.dtype": "write bfloat16",
        },
        {"data.return_raw_chat", f"{ROLLOUT}.mode"},
    ),
}
"""For each job: some of the settings in the imported file, all refused settings with a part of the
reason, and some of the settings that are not taken over."""


@pytest.mark.parametrize("name", EXPECTED)
def test_jobs_are_imported(tmp_path, name: str):
    mapped, refused, unused = EXPECTED[name]
    text = import_verl(write_script(tmp_path, name), [], {})
    content = yaml.safe_load(text)
    assert {key: get(content, key) for key in mapped} == mapped
    flat = " ".join(re.sub(r"(?m)^ *#", "", text).split())
    todos = dict(re.findall(r"TODO ([\w.-]+): (.*?)(?= TODO | \w+: |$)", flat))
    assert todos.keys() == refused.keys()
    assert [key for key, reason in refused.items() if reason not in flat] == []
    rest = text.partition("# Left out")[2]
    assert [key for key in unused if f"{key}=" not in rest] == []


@pytest.mark.parametrize("name", EXPECTED)
def test_settings_files_of_jobs_load(name: str):
    """Users may also keep a file for verl unchanged: the same settings are refused."""
    settings = [one for one in jobs()[name] if not one.startswith("--")]
    keys = {".".join(read_override(one)[0]) for one in settings}
    try:
        problems = ()
        notes = load_config({}, settings).notes
    except InputError as error:
        problems, notes = error.problems, ()
    refused = EXPECTED[name][1]
    assert {problem.partition(":")[0] for problem in problems} == refused.keys()
    assert refused.keys() <= keys
    assert refused or any("not taken over; Retrace has no such setting" in note for note in notes)


@needs_verl
def test_the_page_shows_the_different_defaults():
    page = PAGE.read_text()
    assert render(page) == page, "run `make docs`"
