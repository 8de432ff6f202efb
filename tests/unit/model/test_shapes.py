"""A config.json from a different model contradicts the weights. In every family, the correct
config.json matches them."""

from pathlib import Path

import pytest

from pipeline.inputs.model_folder import find_model
from pipeline.model.shapes import shape_problems
from tests.tiny_models import FAMILIES, make_tiny

FIX = "; use the config.json that came with the weights"
QWEN = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "hidden_size": 4}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    return {family: make_tiny(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_contradictions_are_named(models: dict[str, Path], family: str):
    """The check also works without shapes, because a model's index contains only names."""
    model = find_model(str(models[family]))
    config, shapes = model.config, model.shapes
    names = dict.fromkeys(shapes, ())
    assert shape_problems(config, shapes) == shape_problems(config, names) == []
    wrong = {"num_hidden_layers": 6, "vocab_size": 300, "hidden_size": 128}
    found = {"num_hidden_layers": "4 layers", "vocab_size": "512 tokens",
             "hidden_size": "64 numbers for each token"}  # fmt: skip
    for field in {"num_experts", "num_local_experts", "n_routed_experts"} & set(config):
        wrong[field], found[field] = 32, f"{config[field]} experts in a layer"
    for field, value in wrong.items():
        problem = f"has {field}={value}, but the weights have {found[field]}{FIX}"
        assert shape_problems({**config, field: value}, shapes) == [problem]
        known = field not in ("vocab_size", "hidden_size")
        assert shape_problems({**config, field: value}, names) == [problem] * known


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight"])
def test_tied_embeddings_may_have_either_name(name: str):
    config = {**QWEN, "vocab_size": 10}
    assert shape_problems(config, {name: (10, 4)}) == []
    assert len(shape_problems(config, {name: (12, 4)})) == 1


def test_multi_token_prediction_layers_do_not_count():
    """DeepSeek-V3's files contain such a layer. It is not counted, even if num_nextn_predict_layers
    was set to 0 for training."""
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "n_routed_experts": 256}
    layers = {f"model.layers.{layer}.mlp.gate.weight": (256, 4) for layer in range(62)}
    assert shape_problems(config, {**layers, "model.layers.61.eh_proj.weight": (4, 8)}) == []
    assert len(shape_problems(config, layers)) == 1


def test_the_router_gives_the_number_of_fused_experts():
    shapes = {"model.layers.1.mlp.experts.gate_up_proj": (16, 4, 4)}
    assert shape_problems(QWEN, shapes) == []
    router = {"model.layers.1.mlp.gate.weight": (16, 4)}
    [problem] = shape_problems(QWEN, {**shapes, **router})
    assert "has num_experts=8, but the weights have 16 experts" in problem


def test_unknown_names_and_families_are_not_checked():
    assert shape_problems(QWEN, {"w": (1, 2), "language_model.layers.9.w": (3,)}) == []
    shapes = {"model.layers.9.mlp.gate.weight": (16, 4)}
    assert shape_problems({**QWEN, "model_type": "another"}, shapes) == []
