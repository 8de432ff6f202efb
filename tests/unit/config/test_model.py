"""Which layers are MoE layers is what the family's own model code in transformers does."""

import pytest
from transformers import AutoModelForCausalLM

from pipeline.config.errors import InputError
from pipeline.config.model import MoeGeometry, moe_geometry
from tests.tiny_models import FAMILIES, tiny_config

VARIANTS = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("mixtral", {}),
    ("deepseek_v3", {"first_k_dense_replace": 2}),
    ("qwen3", {}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_equals_the_models_own_layers(family, overrides):
    """The layers with a router in transformers' model are those that the config is read to have."""
    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config)
    layers = tuple(
        index
        for index, layer in enumerate(model.model.layers)
        if any(name.endswith("experts") for name, _ in layer.named_modules())
    )
    geometry = moe_geometry(config.to_dict())
    assert (geometry.layers if geometry else ()) == layers
    if geometry:
        shape = FAMILIES[family]
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        assert geometry.experts == next(shape[name] for name in names if name in shape)
        assert geometry.topk == shape["num_experts_per_tok"]


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts(name):
    """transformers 5 writes num_local_experts where published checkpoints have num_experts."""
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts_per_tok": 2, name: 8}
    assert moe_geometry(config) == MoeGeometry(8, 2, (0,))


def test_glm4_moe():
    config = {"model_type": "glm4_moe", "num_hidden_layers": 3, "n_routed_experts": 128,
              "num_experts_per_tok": 8, "first_k_dense_replace": 1}  # fmt: skip
    assert moe_geometry(config) == MoeGeometry(128, 8, (1, 2))


def test_no_experts_is_dense():
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts_per_tok": 2}
    assert moe_geometry({**config, "num_experts": 0}) is None
    assert moe_geometry({**config, "num_experts": 8, "mlp_only_layers": [0, 1]}) is None


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"num_local_experts": 8}, "num_experts_per_tok=None"),
        ({"num_experts_per_tok": 2}, "num_local_experts=None"),
        ({"num_local_experts": "8", "num_experts_per_tok": 2}, "num_local_experts='8'"),
    ],
)
def test_broken_config_is_named(config, name):
    """A number that is missing is never taken for a dense model."""
    with pytest.raises(InputError, match=f"config.json has {name}, expected an integer"):
        moe_geometry({"model_type": "mixtral", "num_hidden_layers": 2, **config})
