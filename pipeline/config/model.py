"""What a model's HF config.json says about its MoE layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.errors import InputError

KNOWN_FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v3", "glm4_moe")
"""MoE families whose layout is known, by `model_type`."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts: transformers 5 renames num_experts to num_local_experts."""


@dataclass(frozen=True)
class MoeGeometry:
    """Shape of a model's routing. Example: MoeGeometry(experts=16, topk=4, layers=(1, 2, 3))."""

    experts: int
    topk: int
    layers: tuple[int, ...]
    """Model indices of the MoE layers, ascending; dense layers never appear."""


def moe_geometry(hf_config: Mapping[str, Any]) -> MoeGeometry | None:
    """The routing of a model; None for a dense one.

    Which layers are MoE layers is decided as the family's own model code in transformers does.
    Raises InputError for a MoE family that is not known, and for a known one whose config lacks
    what is needed.
    """
    family = hf_config.get("model_type")
    if family not in KNOWN_FAMILIES:
        marks = [f"{mark}={_number(hf_config, mark)}" for mark in _EXPERTS if hf_config.get(mark)]
        if marks:
            raise InputError(
                [
                    f"actor_rollout_ref.model.path: model_type {family!r} with {', '.join(marks)} "
                    f"is a MoE family that is not known; known are {', '.join(KNOWN_FAMILIES)}"
                ]
            )
        return None
    number = _need(hf_config, "num_hidden_layers")
    experts = _experts(hf_config)
    if experts == 0:
        return None
    layers = tuple(layer for layer in range(number) if _is_moe(family, hf_config, layer))
    if not layers:
        return None
    return MoeGeometry(experts, _need(hf_config, "num_experts_per_tok"), layers)


def _experts(hf_config: Mapping[str, Any]) -> int:
    there = [name for name in _EXPERTS if hf_config.get(name) is not None]
    return _number(hf_config, there[0] if there else "num_local_experts")


def _is_moe(family: str, hf_config: Mapping[str, Any], layer: int) -> bool:
    if family == "mixtral":
        return True
    if family in ("qwen2_moe", "qwen3_moe"):
        every = _need(hf_config, "decoder_sparse_step", default=1)
        return layer not in (hf_config.get("mlp_only_layers") or []) and (layer + 1) % every == 0
    dense_first = _need(hf_config, "first_k_dense_replace")
    every = _need(hf_config, "moe_layer_freq", default=1)
    return layer >= dense_first and layer % every == 0


def _need(hf_config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    if hf_config.get(name) is None and default is not None:
        return default
    return _number(hf_config, name)


def _number(hf_config: Mapping[str, Any], name: str) -> int:
    value = hf_config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(
            [
                f"actor_rollout_ref.model.path: config.json has {name}={value!r}, expected an "
                "integer; use the config.json that came with the model"
            ]
        )
    return value
