"""A config.json from a different model contradicts the weights. In every family, the correct
config.json matches them."""

from pathlib import Path

import pytest

from pipeline.inputs.model_folder import find_model
from pipeline.model.families import FAMILIES as TRAINED
from pipeline.model.shapes import shape_problems, tensor_shapes
from tests.tiny_models import FAMILIES, make_own, make_tiny

FIX = "; use the config.json that came with the weights"


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


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shapes_of_tensors_follow_from_config_json(models: dict[str, Path], family: str):
    model = find_model(str(models[family]))
    assert tensor_shapes(model.config) == model.shapes


@pytest.mark.parametrize("family", TRAINED)
def test_a_model_as_transformers_writes_it_has_no_problems(tmp_path: Path, family: str):
    model = find_model(str(make_own(tmp_path, family)))
    assert tensor_shapes(model.config) == model.shapes
    assert shape_problems(model.config, model.shapes) == []


GATE = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.mark.parametrize("names_only", [False, True])
def test_tensors_that_a_model_lacks_or_has_no_place_for_are_named(models, names_only: bool):
    """Without the check, engines and ranks would start, and fail when they load the weights."""
    model = find_model(str(models["qwen3_moe"]))
    whole = dict.fromkeys(model.shapes, ()) if names_only else dict(model.shapes)
    lacks = {name: shape for name, shape in whole.items() if name != GATE}
    bias = "model.layers.0.self_attn.q_proj.bias"
    fused = "model.layers.2.mlp.experts.gate_up_proj"
    for shapes, named in (
        (lacks, f"requires {GATE}, which the weights lack"),
        ({**whole, bias: ()}, f"has no place for {bias}"),
        ({**lacks, fused: (16, 64, 64)}, f"does not describe {fused}"),
    ):
        [problem] = shape_problems(model.config, shapes)
        assert problem.startswith(named)


def test_a_tensor_of_another_shape_is_named(models):
    model = find_model(str(models["qwen3_moe"]))
    shapes = {**model.shapes, GATE: (64, 32)}
    [problem] = shape_problems(model.config, shapes)
    assert problem.startswith(
        f"implies the shape [32, 64] for {GATE}, but the weights have [64, 32"
    )


def test_the_output_layer_follows_tie_word_embeddings(models):
    """With tied embeddings, the trainer could not export a separate output layer."""
    model = find_model(str(models["qwen3"]))
    [problem] = shape_problems({**model.config, "tie_word_embeddings": True}, model.shapes)
    assert problem.startswith(
        "has tie_word_embeddings=True, but the weights contain lm_head.weight"
    )
    untied = {name: shape for name, shape in model.shapes.items() if name != "lm_head.weight"}
    [problem] = shape_problems(model.config, untied)
    assert problem.startswith("requires lm_head.weight")


def test_multi_token_prediction_layers_do_not_count():
    """DeepSeek-V3's files contain such a layer."""
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "n_routed_experts": 256}
    layers = {f"model.layers.{layer}.mlp.gate.weight": (256, 4) for layer in range(62)}
    assert shape_problems(config, {**layers, "model.layers.61.eh_proj.weight": (4, 8)}) == []
    assert len(shape_problems(config, layers)) == 1
