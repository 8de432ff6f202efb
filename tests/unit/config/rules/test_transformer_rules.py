"""The table of refused fields is compared with Megatron-core's own TransformerConfig."""

from typing import Any

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from pipeline.config.actor import Megatron, RouterReplay
from pipeline.config.rules.overrides import MEGATRON, OVERRIDE, TRANSFORMER
from pipeline.config.rules.transformer_rules import (
    REFUSED,
    field_problems,
    has_auxiliary_loss,
    intended_fields,
    recompute_notes,
)
from tests.unit.config.settings import QWEN3, QWEN3_MOE

FIELDS = {field for rule in REFUSED for field in rule.fields.split()}
GLM4_MOE = QWEN3_MOE | {"model_type": "glm4_moe", "n_routed_experts": 16}
R3 = RouterReplay(mode="R3")
AS_MBRIDGE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_moe_experts": 8,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.001,
    "add_bias_linear": False,
    "moe_router_bias_update_rate": 0.0,
}


def found(replay: RouterReplay = R3, **settings: Any) -> list[str]:
    """Return the problems with a TransformerConfig. Settings that its constructor refuses are
    assigned after construction."""
    config = TransformerConfig(**AS_MBRIDGE)
    try:
        config = TransformerConfig(**{**AS_MBRIDGE, **settings})
    except (AssertionError, ValueError):
        vars(config).update(settings)
    return field_problems(vars(config), replay)


def test_the_table_contains_only_existing_fields_and_settings():
    assert vars(TransformerConfig(**AS_MBRIDGE)).keys() >= FIELDS
    assert {rule.accepted_by for rule in REFUSED} - {None} <= set(RouterReplay.model_fields)


def test_the_config_of_mbridge_passes():
    assert found() == []


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("moe_router_fusion", {"moe_router_fusion": True}),
        ("moe_router_load_balancing_type", {"moe_router_load_balancing_type": "sinkhorn"}),
        ("moe_expert_capacity_factor", {"moe_expert_capacity_factor": 1.0}),
        ("moe_expert_capacity_factor", {"moe_expert_capacity_factor": 0}),
        ("moe_router_padding_for_fp8", {"moe_router_padding_for_fp8": True}),
        ("moe_router_padding_for_quantization", {"moe_router_padding_for_quantization": True}),
        ("moe_router_force_load_balancing", {"moe_router_force_load_balancing": True}),
        ("moe_input_jitter_eps", {"moe_input_jitter_eps": 0.1}),
        ("moe_input_jitter_eps", {"moe_input_jitter_eps": 0.0}),
        ("moe_enable_routing_replay", {"moe_enable_routing_replay": True}),
        ("cuda_graph_impl", {"cuda_graph_impl": "local"}),
        ("cuda_graph_impl", {"cuda_graph_impl": "local", "cuda_graph_scope": ["attn"]}),
        ("cuda_graph_impl", {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": []}),
        (
            "cuda_graph_impl",
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn", "moe_router"]},
        ),
        ("moe_aux_loss_coeff", {"moe_router_load_balancing_type": ["seq_aux_loss"]}),
        ("moe_aux_loss_coeff", {"moe_router_load_balancing_type": "global_aux_loss"}),
    ],
)
def test_fields_that_would_disable_replay_are_refused(field, settings):
    """The values are refused regardless of their source. Without replay, they are allowed."""
    [problem] = found(**settings)
    assert problem.startswith(f"{OVERRIDE}.{field}: found {settings.get(field, 0.001)!r}; with ")
    assert found(RouterReplay(), **settings) == []


@pytest.mark.parametrize(
    "settings",
    [
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]},
        {"moe_router_load_balancing_type": "aux_loss"},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.0},
    ],
)
def test_fields_that_are_compatible_with_replay_pass(settings):
    assert found(RouterReplay(mode="R3", allow_aux_loss=True), **settings) == []


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        (f"{OVERRIDE}.attention_dropout: found 0.1", {"attention_dropout": 0.1}),
        (f"{OVERRIDE}.hidden_dropout: found 0.2", {"hidden_dropout": 0.2}),
        (
            f"{MEGATRON}.sequence_parallel: found False",
            {"tensor_model_parallel_size": 2, "sequence_parallel": False},
        ),
        (
            f"{OVERRIDE}.pipeline_model_parallel_layout: found 'Et|L'",
            {"pipeline_model_parallel_layout": "Et|L"},
        ),
        (f"{OVERRIDE}.cp_comm_type: found 'a2a'", {"cp_comm_type": "a2a"}),
        (f"{OVERRIDE}.cp_comm_type: found ['p2p', 'p2p']", {"cp_comm_type": ["p2p", "p2p"]}),
        (f"{OVERRIDE}.moe_router_enable_expert_bias:", {"moe_router_enable_expert_bias": True}),
        (f"{OVERRIDE}.moe_router_bias_update_rate:", {"moe_router_bias_update_rate": 0.001}),
    ],
)
def test_some_fields_are_refused_even_without_replay(key, settings):
    [problem] = found(RouterReplay(), **settings)
    assert problem.startswith(key)


def test_an_expert_bias_requires_sigmoid_scores():
    bias = {"moe_router_enable_expert_bias": True}
    assert found(**bias, moe_router_score_function="sigmoid") == []
    override = Megatron(override_transformer_config=bias)
    models = ((None, True), (QWEN3, False), (QWEN3_MOE, False), (GLM4_MOE, True))
    for model, is_right in models:
        assert (field_problems(intended_fields(override, model), R3) == []) is is_right


def test_context_parallelism_with_point_to_point_exchange_passes():
    assert found(cp_comm_type="p2p") == found(cp_comm_type=None) == []


def test_a_dense_model_does_not_require_sequence_parallelism():
    dense = {"tensor_model_parallel_size": 2, "sequence_parallel": False, "num_moe_experts": None}
    assert found(**dense) == []


@pytest.mark.parametrize("wrong", [{"overlap_p2p_comm": False}, {"batch_p2p_comm": True}])
def test_a_virtual_pipeline_with_batched_exchange_is_refused(wrong):
    """With two pipeline stages, an activation would arrive as a gradient."""
    right = {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    stages = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    stages |= {"num_layers": 4, "pipeline_dtype": "x"}
    assert found(**stages, **right) == []
    [problem] = found(**stages, **{**right, **wrong})
    assert problem.startswith(f"{OVERRIDE}.{next(iter(wrong))}: found ")
    assert found(**wrong) == []


def test_fields_without_an_effect_are_noted():
    def notes(**fields: Any) -> list[str]:
        return list(recompute_notes(Megatron(override_transformer_config=fields)))

    modules = {"recompute_modules": ["moe"]}
    (note,) = notes(**modules)
    assert note.startswith(f"{OVERRIDE}.recompute_modules: ['moe'] has no effect with")
    assert notes(**modules, recompute_granularity="selective") == []
    full = {"recompute_method": "uniform", "recompute_num_layers": 1}
    assert len(notes(**full)) == 2
    assert notes(**full, recompute_granularity="full") == []


def test_the_auxiliary_loss_requires_a_kind_and_a_coefficient():
    def on(kind: Any, coefficient: Any) -> bool:
        fields = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coefficient}
        return has_auxiliary_loss(fields)

    assert on("aux_loss", 0.1)
    assert on(["none", "seq_aux_loss"], [0.0, 0.1])
    assert not on("none", 0.1)
    assert not on("aux_loss", 0.0)


def test_check_covers_every_refused_field_with_its_own_setting():
    """If `intended_fields` omitted a field, its rule would apply only in the trainer, which is too
    late."""
    seen = intended_fields(Megatron(), None)
    assert FIELDS & TRANSFORMER.owned.keys() <= seen.keys()
