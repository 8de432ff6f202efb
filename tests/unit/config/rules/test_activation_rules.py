"""`retrace check` refuses activation settings that Megatron-core would refuse or ignore."""

import pytest
from megatron.core.transformer.transformer_config import TransformerConfig

from pipeline.config.actor import Megatron
from pipeline.config.rules.activation_rules import activation_problems

MODEL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
LAYERS = {"cpu_offloading": True, "cpu_offloading_num_layers": 2}
FINE = {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn", "attn_proj"]}


def without(settings: dict, *names: str) -> dict:
    return {name: value for name, value in settings.items() if name not in names}


@pytest.mark.parametrize("settings", [{}, FULL, SELECTIVE, LAYERS, FINE])
def test_settings_that_megatron_accepts_pass(settings):
    assert list(activation_problems(Megatron(override_transformer_config=settings))) == []
    TransformerConfig(**MODEL, **settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (without(FULL, "recompute_method"), "recompute_method: found null, but"),
        (without(FULL, "recompute_num_layers"), "recompute_num_layers: found null, but"),
        (SELECTIVE | {"recompute_num_layers": 1}, "recompute_num_layers: found 1, but"),
        (LAYERS | SELECTIVE, "cpu_offloading: found True with recompute_granularity"),
        (FINE | LAYERS, "fine_grained_activation_offloading: found True with cpu_offloading"),
        (without(FINE, "offload_modules"), "offload_modules: found null, expected one or more of"),
        (FINE | {"offload_modules": [None]}, "offload_modules: found null, expected one or more"),
        (FINE | {"offload_modules": ["mlp"]}, "offload_modules: found 'mlp', expected one or more"),
        (FINE | {"offload_modules": ["attn_proj"]}, "offload_modules: found attn_proj without"),
    ],
)
def test_settings_that_megatron_refuses_are_refused(settings, expected):
    """Megatron-core refuses these settings only when a rank builds its model."""
    (problem,) = activation_problems(Megatron(override_transformer_config=settings))
    assert f"override_transformer_config.{expected}" in problem
    assert any(word in problem for word in ("write", "leave", "list the modules"))
    with pytest.raises((AssertionError, ValueError)):
        TransformerConfig(**MODEL, **settings)


def test_the_nearest_module_is_named():
    fields = FINE | {"offload_modules": ["mpl_norm"]}
    (problem,) = activation_problems(Megatron(override_transformer_config=fields))
    assert problem.endswith("; did you mean mlp_norm?")


def test_offloaded_layers_require_a_single_stage():
    megatron = Megatron(pipeline_model_parallel_size=2, override_transformer_config=LAYERS)
    (problem,) = activation_problems(megatron)
    assert "pipeline_model_parallel_size=2, which Megatron-core does not support" in problem


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (without(FULL, "recompute_granularity"), "found null with method=uniform, num_layers=1"),
        (without(LAYERS, "cpu_offloading_num_layers"), "so no layer would be offloaded"),
        ({"offload_modules": ["core_attn"]}, "has no effect without fine_grained_activation"),
    ],
)
def test_settings_without_effect_are_refused(settings, expected):
    """Megatron-core accepts these settings silently."""
    TransformerConfig(**MODEL, **settings)
    (problem,) = activation_problems(Megatron(override_transformer_config=settings))
    assert expected in problem
