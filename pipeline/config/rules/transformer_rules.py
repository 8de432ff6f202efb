"""Values that the fields of Megatron-core's TransformerConfig must not have.

One table of refused values (REFUSED) serves two callers. `retrace check` applies it to the fields
that the settings and config.json imply (`intended_fields`). The trainer applies it to Megatron's
actual TransformerConfig. docs/replay.md gives the reasons for values that are refused with replay.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.actor import Megatron, RouterReplay
from pipeline.config.rules.overrides import MEGATRON, OVERRIDE, TRANSFORMER
from pipeline.errors import shown
from pipeline.model.families import FAMILIES, moe_geometry

_REPLAY = "actor_rollout_ref.actor.router_replay"
Fields = Mapping[str, Any]
"""Values of TransformerConfig, keyed by field. An absent field counts as accepted."""


@dataclass(frozen=True)
class Refused:
    """Values that some fields must not have."""

    fields: str
    """The names of the fields, separated by spaces."""
    when: Callable[[Any, Fields], bool]
    """Returns whether a value is refused; called with the value, of any type, and all fields."""
    why: str
    fix: str = "leave it out"
    with_replay: bool = False
    """Whether the rule applies only while routes are replayed."""
    accepted_by: str | None = None
    """The setting of router_replay with which users accept the value; None if there is none."""


def field_problems(fields: Fields, replay: RouterReplay) -> list[str]:
    """Return problems with values that Megatron-core or replay would handle incorrectly."""
    problems = []
    for rule in REFUSED:
        if rule.with_replay and replay.mode == "disabled":
            continue
        if rule.accepted_by is not None and getattr(replay, rule.accepted_by):
            continue
        when = f"with {_REPLAY}.mode=R2 or R3, " if rule.with_replay else ""
        for field in rule.fields.split():
            if field in fields and rule.when(fields[field], fields):
                key = TRANSFORMER.owned.get(field, f"{OVERRIDE}.{field}")
                found = f"{key}: found {shown(fields[field])}"
                problems.append(f"{found}; {when}{rule.why}; {rule.fix}")
    return problems


def intended_fields(megatron: Megatron, hf_config: Mapping[str, Any] | None) -> Fields:
    """Return the fields of the table, with the values that the settings and config.json imply.

    Args:
        megatron: The settings of Megatron-core.
        hf_config: The model's config.json; None if it is not known.
    """
    override, model = megatron.override_transformer_config, hf_config or {}
    fields = {"attention_dropout": model.get("attention_dropout", 0.0)}
    if "moe_aux_loss_coeff" not in override:
        # mbridge's defaults; DeepSeek's config.json may lack the coefficient.
        inherited = model.get("router_aux_loss_coef", model.get("aux_loss_alpha", 0.001))
        fields |= {"moe_aux_loss_coeff": inherited, "moe_router_load_balancing_type": "none"}
    fields |= override
    tp = megatron.tensor_model_parallel_size
    geometry = moe_geometry(model) if model else None
    if family := FAMILIES.get(str(model.get("model_type"))):
        scores = "sigmoid" if family.expert_bias else "softmax"
        fields |= {"moe_router_score_function": scores}
    return fields | {
        "tensor_model_parallel_size": tp,
        "virtual_pipeline_model_parallel_size": megatron.virtual_pipeline_model_parallel_size,
        "sequence_parallel": megatron.sequence_parallel and tp > 1,
        "num_moe_experts": None if geometry is None else geometry.experts,
    }


def recompute_notes(megatron: Megatron) -> Iterator[str]:
    """Yield a note on each recompute_ field that has no effect with recompute_granularity."""
    override = megatron.override_transformer_config
    granularity = override.get("recompute_granularity")
    for name, needs in (("modules", "selective"), ("method", "full"), ("num_layers", "full")):
        if (value := override.get(f"recompute_{name}")) and granularity != needs:
            yield (
                f"{OVERRIDE}.recompute_{name}: {value} has no effect with recompute_granularity="
                f"{granularity or 'null'}; write recompute_granularity={needs} to use it"
            )


def has_auxiliary_loss(fields: Fields) -> bool:
    """Return whether a load-balancing loss contributes to the gradients."""
    return _auxiliary_loss(fields["moe_aux_loss_coeff"], fields)


def _auxiliary_loss(coefficients: Any, fields: Fields) -> bool:
    kinds = _listed(fields.get("moe_router_load_balancing_type", "aux_loss"))
    on = any(isinstance(c, int | float) and c != 0 for c in _listed(coefficients))
    return on and any("aux_loss" in str(kind) for kind in kinds)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _graphs_cover_router(implementation: Any, fields: Fields) -> bool:
    if implementation in (None, "none"):
        return False
    if implementation != "transformer_engine":  # "local" captures entire layers
        return True
    scope = fields.get("cuda_graph_scope", "full")
    names = scope.split(",") if isinstance(scope, str) else _listed(scope)
    scopes = {str(getattr(name, "name", name)) for name in names}  # enums in Megatron-core
    return not scopes or not scopes <= {"attn", "mlp", "mamba"}  # empty: entire layers


def _is_virtual(fields: Fields) -> bool:
    return bool(fields["virtual_pipeline_model_parallel_size"])


def _is_set(value: Any, _: Fields) -> bool:
    return value not in (None, False, 0)


def _is_not_none(value: Any, _: Fields) -> bool:
    return value is not None


def _is_not_zero(value: Any, _: Fields) -> bool:
    return bool(value != 0)


_DIVERGE = "the log-prob pass and the update would compute different results"
_VIRTUAL = (
    f"with {MEGATRON}.virtual_pipeline_model_parallel_size, Megatron-core would silently confuse "
    "activations and gradients"
)
_GRAPH = "a CUDA graph over the router would repeat earlier choices of experts"

_ALWAYS = (
    Refused(
        "pipeline_model_parallel_layout",
        _is_set,
        "a layout of single layers is not supported yet",
        "write num_layers_in_first_pipeline_stage or num_layers_in_last_pipeline_stage",
    ),
    Refused(
        "cp_comm_type",
        lambda value, _: value not in (None, "p2p"),
        "context-parallel ranks pass their keys and values around a ring",
        "write p2p, or leave it out",
    ),
    Refused(
        "hybrid_context_parallel hierarchical_context_parallel_sizes",
        _is_set,
        "each sequence is split over all context-parallel ranks, which form one group, or over "
        "none",
    ),
    # A batched exchange posts both directions to one peer, which matches them in order. With two
    # stages, an activation then arrives as a gradient, without an error.
    Refused(
        "overlap_p2p_comm",
        lambda value, fields: _is_virtual(fields) and value is not True,
        _VIRTUAL,
        "leave it out, which makes it true",
    ),
    Refused(
        "batch_p2p_comm",
        lambda value, fields: _is_virtual(fields) and value is not False,
        _VIRTUAL,
        "leave it out, which makes it false",
    ),
    Refused(
        "sequence_parallel",
        lambda value, fields: (
            not value
            and bool(fields["num_moe_experts"])
            and fields["tensor_model_parallel_size"] > 1
        ),
        "Megatron-core trains experts under tensor parallelism only with sequence parallelism",
        "write True",
    ),
    Refused(
        "moe_router_enable_expert_bias",
        lambda value, fields: (
            value is True and fields.get("moe_router_score_function", "sigmoid") != "sigmoid"
        ),
        "the model's routers have softmax scores, for which Megatron-core has no expert bias",
    ),
    Refused(
        "moe_router_bias_update_rate",
        _is_not_zero,
        "an expert bias that is updated would drift away from the engine's",
        "leave it out, which makes it 0.0",
    ),
    Refused(
        "attention_dropout hidden_dropout",
        _is_not_zero,
        _DIVERGE,
        "write 0.0, even if the value comes from the model's config.json",
    ),
)
_WITH_REPLAY = (
    Refused("moe_router_fusion", _is_set, "a fused router would not use the recorded experts"),
    Refused(
        "moe_router_load_balancing_type",
        lambda value, _: "sinkhorn" in _listed(value),
        "sinkhorn does not choose experts by top-k",
    ),
    Refused(
        "moe_expert_capacity_factor",
        _is_not_none,
        "a capacity limit would drop tokens from their recorded experts",
    ),
    Refused(
        "moe_router_padding_for_quantization moe_router_padding_for_fp8",
        _is_set,
        "padding would add tokens to experts",
    ),
    Refused(
        "moe_router_force_load_balancing",
        _is_set,
        "random experts would replace the recorded ones",
    ),
    Refused(
        "moe_input_jitter_eps",
        _is_not_none,
        "noise at the router's input would make passes differ",
    ),
    Refused("enable_cuda_graph external_cuda_graph", _is_set, _GRAPH),
    Refused(
        "cuda_graph_impl",
        _graphs_cover_router,
        _GRAPH,
        "leave it out, or write transformer_engine and, as cuda_graph_scope, some of attn, mlp "
        "and mamba",
    ),
    Refused(
        "moe_enable_routing_replay",
        _is_set,
        "Megatron-core's own replay would replace this one",
    ),
    Refused(
        "moe_aux_loss_coeff",
        _auxiliary_loss,
        "an auxiliary load-balancing loss is computed from the router's own choice, not from "
        "the replayed one",
        f"write 0.0, or accept it with {_REPLAY}.allow_aux_loss=True",
        accepted_by="allow_aux_loss",
    ),
)
"""Values that are refused only while routes are replayed."""

REFUSED = (*_ALWAYS, *(replace(rule, with_replay=True) for rule in _WITH_REPLAY))
"""All refused values, in the order in which problems are reported."""
