"""The geometry of models, compared with transformers, and configs that the trainer cannot support.

Errors name the fields that the trainer would ignore, whatever form the config takes.
"""

import pytest
from transformers import AutoModelForCausalLM

from pipeline.errors import InputError
from pipeline.model.families import moe_geometry, training_problems
from pipeline.model.geometry import Geometry
from tests.tiny_models import FAMILIES, tiny_config

VARIANTS = [
    ("qwen3_moe", {}),
    ("qwen3_moe", {"decoder_sparse_step": 2}),
    ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("mixtral", {}),
    ("deepseek_v3", {"first_k_dense_replace": 2}),
    ("glm4_moe", {}),
    ("glm4_moe", {"first_k_dense_replace": 3}),
    ("qwen3", {}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_the_geometry_has_the_moe_layers_of_the_transformers_model(family, overrides):
    """The config's MoE layers are the layers with experts in transformers' model."""
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
def test_the_number_of_experts_has_two_names(name):
    """Published checkpoints contain num_experts, and transformers 5 writes num_local_experts."""
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts_per_tok": 2, name: 8}
    assert moe_geometry(config) == Geometry(8, 2, (0,))


def test_a_model_without_experts_is_dense():
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts_per_tok": 2}
    assert moe_geometry({**config, "num_experts": 0}) is None
    assert moe_geometry({**config, "num_experts": 8, "mlp_only_layers": [0, 1]}) is None


@pytest.mark.parametrize("config", [{"model_type": "gpt2"}, {"model_type": "x", "num_experts": 4}])
def test_an_unknown_family_is_refused(config):
    """This includes configs that look dense: they may have experts under an unknown name."""
    with pytest.raises(
        InputError, match=r"cannot be trained: .*; expected one of deepseek_v3, glm"
    ):
        moe_geometry(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_models_can_be_trained(family):
    assert training_problems(tiny_config(family).to_dict()) == []


@pytest.mark.parametrize(
    ("family", "overrides", "part"),
    [
        ("mixtral", {"sliding_window": 64}, "sliding_window=64"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window=64"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
         "rope_type='linear', expected default:"),
        *((family, {"attention_bias": True}, "attention_bias=True, expected False")
          for family in ("deepseek_v3", "llama", "qwen3", "qwen3_moe")),
        ("llama", {"mlp_bias": True}, "mlp_bias=True"),
        ("llama", {"qkv_bias": True}, "qkv_bias=True"),
        ("llama", {"bias": True}, "bias=True"),
        ("deepseek_v3", {"topk_group": 4}, "topk_group=4"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("glm4_moe", {"n_group": 4, "topk_group": 4}, "topk_group=4"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=False"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    ],
)  # fmt: skip
def test_fields_that_megatron_would_ignore_are_named(family, overrides, part):
    """The check finds the fields in transformers' config and under the names in config.json."""
    for config in (tiny_config(family, **overrides).to_dict(), {**FAMILIES[family], **overrides}):
        [problem] = training_problems(config)
        assert part in problem


QWEN3_MOE_30B = {
    "model_type": "qwen3_moe", "hidden_act": "silu", "rope_scaling": None, "rope_theta": 1000000.0,
    "sliding_window": None, "use_sliding_window": False, "norm_topk_prob": True,
}  # fmt: skip
QWEN_MOE_A2_7B = {
    "model_type": "qwen2_moe", "hidden_act": "silu", "rope_theta": 1000000.0,
    "sliding_window": 32768, "use_sliding_window": False, "norm_topk_prob": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_act": "silu", "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096},
}  # fmt: skip
"""Fields from the published config.json files, under the names that transformers 4 uses."""


@pytest.mark.parametrize(
    ("published", "change", "part"),
    [
        (QWEN3_MOE_30B, {}, None),
        (QWEN3_MOE_30B, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type='yarn'"),
        (QWEN3_MOE_30B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (QWEN_MOE_A2_7B, {}, None),
        (QWEN_MOE_A2_7B, {"use_sliding_window": True}, "sliding_window=32768"),
        (DEEPSEEK_V3, {}, None),
        (DEEPSEEK_V3, {"quantization_config": {"quant_method": "fp8"}}, "convert the weights"),
        (DEEPSEEK_V3, {"rope_scaling": {"type": "linear"}}, "'linear', expected default or yarn:"),
    ],
)
def test_published_configs_are_accepted_and_unsupported_changes_are_named(published, change, part):
    problems = training_problems({**published, **change})
    assert len(problems) == (part is not None)
    assert all(part in problem for problem in problems)
