"""The smallest valid settings, and functions that load and check them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.reading.load import LoadedConfig, load_config
from pipeline.config.rules.check import config_notes, config_problems
from pipeline.errors import InputError

MINIMAL = """
data: {train_files: train.parquet}
actor_rollout_ref: {model: {path: model}}
custom_reward_function: {path: reward.py}
trainer: {experiment_name: test}
"""

QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "router_aux_loss_coef": 0.001,
    "max_position_embeddings": 2048,
}
"""config.json of a small MoE model."""

QWEN3: dict[str, Any] = {
    key: value for key, value in QWEN3_MOE.items() if "expert" not in key and "moe" not in key
} | {"model_type": "qwen3"}
"""config.json of a small dense model."""

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = f"{ACTOR}.megatron"
OVERRIDE = f"{MEGATRON}.override_transformer_config"
REPLAY = f"{ACTOR}.router_replay"
RECORD = f"{ROLLOUT}.enable_rollout_routing_replay"
R3 = (f"{REPLAY}.mode=R3", f"{RECORD}=True")


def load(folder: Path, *overrides: str, text: str = MINIMAL) -> LoadedConfig:
    """Load settings from YAML text, with overrides."""
    path = folder / "config.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def load_error(folder: Path, *overrides: str, text: str = MINIMAL) -> tuple[str, ...]:
    """Return the problems found while loading."""
    with pytest.raises(InputError) as caught:
        load(folder, *overrides, text=text)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


def problems(folder: Path, *overrides: str, model: Mapping[str, Any] | None = None) -> list[str]:
    """Return the problems found by the checks; the default model is a small MoE model."""
    return config_problems(load(folder, *overrides).config, QWEN3_MOE if model is None else model)


def the_problem(folder: Path, *overrides: str, model: Mapping[str, Any] | None = None) -> str:
    """Return the only problem found by the checks."""
    (problem,) = problems(folder, *overrides, model=model)
    return problem


def notes(folder: Path, *overrides: str) -> list[str]:
    """Return all notes from loading and checking."""
    loaded = load(folder, *overrides)
    return [*loaded.notes, *config_notes(loaded.config)]
