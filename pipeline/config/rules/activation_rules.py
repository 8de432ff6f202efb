"""Rules for the fields of TransformerConfig that recompute activations or keep them on the host.

Megatron-core refuses some invalid combinations only when a rank builds its model, and ignores
others.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.actor import Megatron
from pipeline.config.rules.transformer_rules import MEGATRON, OVERRIDE
from pipeline.errors import nearest, shown

_OFFLOADED = (
    "attn_norm",
    "attn_proj",
    "core_attn",
    "expert_fc1",
    "mlp_norm",
    "moe_act",
    "qkv_linear",
)
"""Modules whose inputs Megatron-core 0.16.1 can keep on the host."""


def activation_problems(megatron: Megatron) -> Iterator[str]:
    """Yield combinations that Megatron-core would refuse, or that would have no effect."""
    override = megatron.override_transformer_config
    yield from _recompute_problems(override)
    yield from _layer_offload_problems(megatron, override)
    yield from _module_offload_problems(override)


def activation_notes(megatron: Megatron) -> Iterator[str]:
    """Yield a note if recompute_modules has no effect."""
    override = megatron.override_transformer_config
    granularity = override.get("recompute_granularity")
    if override.get("recompute_modules") and granularity != "selective":
        yield (
            f"{OVERRIDE}.recompute_modules: {override['recompute_modules']} has no effect with "
            f"recompute_granularity={granularity or 'null'}; write selective to recompute these "
            "modules"
        )


def _recompute_problems(override: Mapping[str, Any]) -> Iterator[str]:
    key = f"{OVERRIDE}.recompute"
    granularity = override.get("recompute_granularity")
    parts = {name: override.get(f"recompute_{name}") for name in ("method", "num_layers")}
    for name, value in parts.items():
        if granularity == "full" and value is None:
            write = "uniform" if name == "method" else "1"
            yield (
                f"{key}_{name}: found null, but recompute_granularity=full requires a value; "
                f"write {write}"
            )
    if granularity == "selective" and parts["num_layers"] is not None:
        yield (
            f"{key}_num_layers: found {parts['num_layers']!r}, but recompute_granularity=selective "
            "recomputes modules of all layers; leave it out, or write recompute_granularity=full"
        )
    if granularity is None and any(value is not None for value in parts.values()):
        found = ", ".join(f"{name}={value}" for name, value in parts.items() if value is not None)
        yield (
            f"{key}_granularity: found null with {found}, so this has no effect; write full, or "
            "leave these settings out"
        )


def _layer_offload_problems(megatron: Megatron, override: Mapping[str, Any]) -> Iterator[str]:
    if override.get("cpu_offloading") is not True:
        return
    found = f"{OVERRIDE}.cpu_offloading: found True"
    if megatron.pipeline_model_parallel_size > 1:
        yield (
            f"{found} with {MEGATRON}.pipeline_model_parallel_size="
            f"{megatron.pipeline_model_parallel_size}, which Megatron-core does not support; "
            "write 1, or fine_grained_activation_offloading instead"
        )
    if override.get("recompute_granularity") is not None:
        yield (
            f"{found} with recompute_granularity, which Megatron-core does not support; leave one "
            "of the two out"
        )
    if not override.get("cpu_offloading_num_layers"):
        found = shown(override.get("cpu_offloading_num_layers"))
        yield (
            f"{OVERRIDE}.cpu_offloading_num_layers: found {found}, so no layer would be offloaded; "
            "write a number smaller than the model's number of layers"
        )


def _module_offload_problems(override: Mapping[str, Any]) -> Iterator[str]:
    key = f"{OVERRIDE}.offload_modules"
    modules = override.get("offload_modules")
    named = modules if isinstance(modules, list) else []
    expected = f"expected one or more of {', '.join(_OFFLOADED)}"
    if override.get("fine_grained_activation_offloading") is not True:
        if named:
            yield (
                f"{key}: found {named}, which has no effect without "
                "fine_grained_activation_offloading; set both, or leave offload_modules out"
            )
        return
    if override.get("cpu_offloading") is True:
        yield (
            f"{OVERRIDE}.fine_grained_activation_offloading: found True with cpu_offloading; leave "
            "one of the two out"
        )
    if not named:
        yield f"{key}: found {shown(modules)}, {expected}; list the modules"
    for module in named:
        if module not in _OFFLOADED:
            yield f"{key}: found {shown(module)}, {expected}; {nearest(module, _OFFLOADED)}"
    if "attn_proj" in named and "core_attn" not in named:
        yield (
            f"{key}: found attn_proj without core_attn, whose output is the input of attn_proj; "
            "list both, or leave attn_proj out"
        )
