"""Settings of Megatron-core under which replay would do nothing, or something else, in silence.

`retrace check` refuses what the config says; here the TransformerConfig that Megatron really has is
looked at, whatever it came from.
"""

from typing import Any

from pipeline.config.errors import InputError
from pipeline.config.tree import RouterReplay

_KEY = "actor_rollout_ref.actor.megatron.override_transformer_config"
_GRAPHS_WITHOUT_ROUTER = {"attn", "mlp", "mamba"}


def refuse_without_effect(config: Any, replay: RouterReplay) -> None:
    """Raises InputError naming every setting that replay cannot work with."""
    if replay.mode == "disabled":
        return
    problems = []

    def refuse(name: str, why: str, fix: str) -> None:
        problems.append(
            f"{_KEY}.{name} is {getattr(config, name)!r} and router_replay.mode is {replay.mode}: "
            f"{why}; {fix}"
        )

    if config.moe_router_fusion:
        refuse(
            "moe_router_fusion",
            "a fused router never asks for the recorded experts",
            "set it to false",
        )
    if "sinkhorn" in _kinds(config):
        refuse(
            "moe_router_load_balancing_type",
            "sinkhorn routing never asks for the recorded experts",
            "set it to none",
        )
    if config.moe_expert_capacity_factor is not None:
        refuse("moe_expert_capacity_factor", "it drops replayed experts", "set it to null")
    if config.moe_router_padding_for_quantization:
        refuse("moe_router_padding_for_quantization", "it adds experts to rows", "set it to false")
    if config.moe_router_force_load_balancing:
        refuse("moe_router_force_load_balancing", "the router's scores are random", "set to false")
    if config.moe_input_jitter_eps is not None:
        refuse("moe_input_jitter_eps", "the router's scores are random", "set it to null")
    if config.cuda_graph_impl != "none" and _graphs_cover_router(config):
        refuse(
            "cuda_graph_scope",
            "a captured router repeats the experts of its capture",
            f"capture only {sorted(_GRAPHS_WITHOUT_ROUTER)}, or set cuda_graph_impl to none",
        )
    if has_auxiliary_loss(config) and not replay.allow_aux_loss:
        refuse(
            "moe_aux_loss_coeff",
            "the loss is computed from the router's own choice, not the replayed one",
            "set it to 0, or acknowledge it with router_replay.allow_aux_loss=True",
        )
    if problems:
        raise InputError(problems)


def has_auxiliary_loss(config: Any) -> bool:
    """Whether a load-balancing loss takes part in the gradients."""
    coefficients = config.moe_aux_loss_coeff
    if not isinstance(coefficients, list):
        coefficients = [coefficients]
    return any(coefficients) and any("aux_loss" in kind for kind in _kinds(config))


def _kinds(config: Any) -> list[str]:
    kinds = config.moe_router_load_balancing_type
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _graphs_cover_router(config: Any) -> bool:
    scopes = {str(getattr(scope, "name", scope)) for scope in config.cuda_graph_scope or []}
    return not scopes or not scopes <= _GRAPHS_WITHOUT_ROUTER  # empty: the whole layer
