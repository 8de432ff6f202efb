"""Models and settings that the trainer refuses, and the error messages for them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from operators.training.megatron import parallel
from operators.training.megatron.model import build_model
from pipeline.config.actor import Actor, Megatron
from pipeline.errors import InputError

SETTINGS: dict[str, dict[str, Any]] = {
    "unknown field": {"override_transformer_config": {"recompute_granularty": "full"}},
    "field with its own key": {"override_transformer_config": {"bf16": False}},
    "loss per token": {"override_transformer_config": {"calculate_per_token_loss": False}},
    "dropout": {"override_transformer_config": {"hidden_dropout": 0.1}},
    "refused by Megatron": {"override_transformer_config": {"recompute_granularity": "full"}},
    "expert-TP": {"expert_tensor_parallel_size": 2},
    "ranks": {"tensor_model_parallel_size": 2},
    "virtual pipeline": {"virtual_pipeline_model_parallel_size": 2},
}
"""Megatron settings for one rank with a valid model."""


def _edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _edit_weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _add_bias(tensors: dict[str, Any]) -> None:
    tensors["model.layers.0.self_attn.o_proj.bias"] = tensors["model.norm.weight"].clone()


MODELS: dict[str, Callable[[Path], None]] = {
    "model type": lambda folder: _edit_config(folder, model_type="gpt3"),
    "RoPE type": lambda folder: _edit_config(
        folder, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    ),
    "FP8": lambda folder: _edit_config(folder, quantization_config={"quant_method": "fp8"}),
    "missing weight": lambda folder: _edit_weights(folder, lambda t: t.pop("model.norm.weight")),
    "surplus weight": lambda folder: _edit_weights(folder, _add_bias),
}
"""Changes that make a model's folder invalid, keyed by case."""


def refusals(good: Path, scratch: Path) -> dict[str, str]:
    """Return the message of each refusal on one rank, keyed by case."""
    found = {}
    for name, settings in SETTINGS.items():
        found[name] = _refusal(good, Megatron(**settings))
    for name, spoil in MODELS.items():
        folder = scratch / name
        shutil.copytree(good, folder)
        spoil(folder)
        found[name] = _refusal(folder, Megatron())
    return found


def _refusal(folder: Path, megatron: Megatron) -> str:
    started = False
    try:
        parallel.start(megatron)
        started = True
        build_model(folder, Actor(megatron=megatron))
    except InputError as error:
        return str(error)
    finally:
        if started:
            parallel.stop()
    return ""
