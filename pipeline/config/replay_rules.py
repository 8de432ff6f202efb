"""Settings under which a router would not do what a trace says; docs/replay.md has the reasons."""

from collections.abc import Callable, Mapping
from typing import Any

from pipeline.config.model import KNOWN_FAMILIES, MoeGeometry
from pipeline.config.tree import RunConfig

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_RECORD = f"{_ROLLOUT}.enable_rollout_routing_replay"
_MODE = f"{_ACTOR}.router_replay.mode"
_OVERRIDE = f"{_ACTOR}.megatron.override_transformer_config"

_WITHOUT_ROUTER = {"attn", "mlp", "mamba"}
"""Scopes of Transformer Engine's CUDA graphs that leave the router out."""


def replay_problems(
    config: RunConfig, hf_config: Mapping[str, Any] | None, geometry: MoeGeometry | None
) -> list[str]:
    """What forbids replay (or recording) with these settings and this model."""
    replay = config.actor_rollout_ref.actor.router_replay
    recording = config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    problems = []
    if replay.mode == "R3" and not recording:
        problems.append(
            f"{_RECORD}: found False, but {_MODE}=R3 replays what the rollout engine chose; "
            f"add the line {_RECORD}=True"
        )
    if (replay.mode != "disabled" or recording) and hf_config is not None and geometry is None:
        key, value = (_MODE, replay.mode) if replay.mode != "disabled" else (_RECORD, "True")
        off = "disabled" if key == _MODE else "False"
        problems.append(
            f"{key}: found {value}, but the model (model_type {hf_config.get('model_type')!r}) "
            f"has no MoE layers, so there are no routes; write {off}, or take a model of "
            f"{', '.join(KNOWN_FAMILIES)}"
        )
    if replay.mode != "disabled":
        problems += _sampling_problems(config)
        problems += _router_problems(config)
        problems += _auxiliary_loss_problems(config, hf_config)
    return problems


def replay_notes(config: RunConfig) -> list[str]:
    """Recording that replay does not use."""
    mode = config.actor_rollout_ref.actor.router_replay.mode
    if not config.actor_rollout_ref.rollout.enable_rollout_routing_replay or mode == "R3":
        return []
    if mode == "R2":
        return [f"{_RECORD}: the engine's routes are recorded, but R2 replays the trainer's own"]
    return [f"{_RECORD}: the engine's routes are recorded, but not replayed ({_MODE} is disabled)"]


def _sampling_problems(config: RunConfig) -> list[str]:
    rollout = config.actor_rollout_ref.rollout
    why = (
        "with replay on, the engine's log-probs must be of the whole distribution, "
        "not of what sampling keeps of it"
    )
    problems = []
    if rollout.top_p < 1:
        problems.append(f"{_ROLLOUT}.top_p: found {rollout.top_p}; {why}; write 1.0")
    if rollout.top_k > 0:
        problems.append(f"{_ROLLOUT}.top_k: found {rollout.top_k}; {why}; write -1")
    return problems


def _router_problems(config: RunConfig) -> list[str]:
    override = config.actor_rollout_ref.actor.megatron.override_transformer_config
    return [
        f"{_OVERRIDE}.{name}: found {override[name]!r}; with {_MODE} on, {why}; leave it out"
        for name, (refused, why) in _ROUTER.items()
        if name in override and refused(override[name], override)
    ]


def _graphs_cover_router(_: Any, override: Mapping[str, Any]) -> bool:
    if override.get("cuda_graph_impl") != "transformer_engine":
        return True
    scope = override.get("cuda_graph_scope", "full")
    scopes = set(scope) if isinstance(scope, list) else {scope}
    return not scopes or not scopes <= _WITHOUT_ROUTER


def _is_set(value: Any, _: Mapping[str, Any]) -> bool:
    return value not in (None, False, 0)


def _has_sinkhorn(value: Any, _: Mapping[str, Any]) -> bool:
    return "sinkhorn" in (value if isinstance(value, list) else [value])


def _graphs_on(value: Any, override: Mapping[str, Any]) -> bool:
    return value not in (None, "none") and _graphs_cover_router(value, override)


_Refused = Callable[[Any, Mapping[str, Any]], bool]
_ROUTER: dict[str, tuple[_Refused, str]] = {
    "moe_router_fusion": (_is_set, "a fused router would not ask for the recorded experts"),
    "moe_router_load_balancing_type": (
        _has_sinkhorn,
        "sinkhorn chooses experts by itself, not by top-k",
    ),
    "moe_expert_capacity_factor": (
        lambda value, _: value is not None,
        "a capacity would drop tokens from their recorded experts",
    ),
    "moe_router_padding_for_quantization": (_is_set, "padding would add tokens to experts"),
    "moe_router_padding_for_fp8": (_is_set, "padding would add tokens to experts"),
    "moe_router_force_load_balancing": (_is_set, "random experts would replace the recorded ones"),
    "moe_input_jitter_eps": (_is_set, "noise before the router would make passes differ"),
    "enable_cuda_graph": (_is_set, "a CUDA graph over the router would repeat an old choice"),
    "external_cuda_graph": (_is_set, "a CUDA graph over the router would repeat an old choice"),
    "cuda_graph_impl": (_graphs_on, "a CUDA graph over the router would repeat an old choice"),
    "moe_enable_routing_replay": (_is_set, "Megatron-core's own replay would take its place"),
}


def _auxiliary_loss_problems(config: RunConfig, hf_config: Mapping[str, Any] | None) -> list[str]:
    actor = config.actor_rollout_ref.actor
    override = actor.megatron.override_transformer_config
    if actor.router_replay.allow_aux_loss:
        return []
    name, found = _auxiliary_loss(override, hf_config or {})
    if name is None:
        return []
    return [
        f"{_OVERRIDE}.{name}: found {found!r}, an auxiliary load-balancing loss; with {_MODE} on "
        "it is computed from the router's own choice, not from the replayed one; write "
        f"moe_aux_loss_coeff: 0.0, or accept it with {_ACTOR}.router_replay.allow_aux_loss=True"
    ]


def _auxiliary_loss(
    override: Mapping[str, Any], hf_config: Mapping[str, Any]
) -> tuple[str | None, Any]:
    """Which field switches the loss on; None if it is off, as mbridge's defaults have it."""
    types = override.get("moe_router_load_balancing_type", "none")
    on = any("aux_loss" in str(t) for t in (types if isinstance(types, list) else [types]))
    if "moe_aux_loss_coeff" in override:
        coefficient = override["moe_aux_loss_coeff"]
        above_zero = any(
            isinstance(c, int | float) and c > 0  # other types are told as such elsewhere
            for c in (coefficient if isinstance(coefficient, list) else [coefficient])
        )
        return ("moe_aux_loss_coeff", coefficient) if above_zero else (None, None)
    # mbridge takes the coefficient from the model's config; GLM's and DeepSeek's lack it.
    inherited = hf_config.get("router_aux_loss_coef", hf_config.get("aux_loss_alpha", 0.001))
    return ("moe_router_load_balancing_type", types) if on and inherited else (None, None)
