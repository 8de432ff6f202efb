"""Models on GPUs have Transformer Engine's layers, under the names that mbridge expects.

Megatron-core builds the models with a stub (tests/transformer_engine_stub.py), which has the
parameters of Transformer Engine but no kernels. scripts/gpu_hour.sh tests the computation on GPUs.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.torchrun import run_ranks

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent
RECORDED: dict[str, dict[str, str]] = json.loads((HERE / "te_parameters.json").read_text())
"""The number and shape of parameters at TP1, keyed by family and name.

Names contain `{l}` for each layer and `{e}` for each expert. The source is Transformer Engine 2.11.
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("te")
    run_ranks("tests.integration.training_model.te_layers", 1, folder)
    return dict(json.loads((folder / "found.json").read_text()))


@pytest.mark.parametrize("family", RECORDED)
def test_parameters_equal_the_recorded_ones(found, family):
    shapes: dict[str, list[list[int]]] = {}
    for name, shape in found[family]["parameters"].items():
        pattern = re.sub(r"weight\d+$", "weight{e}", re.sub(r"layers\.\d+", "layers.{l}", name))
        shapes.setdefault(pattern, []).append(shape)
    counted = {name: f"{len(all_)} x {all_[0]}" for name, all_ in shapes.items()}
    assert counted == RECORDED[family]
    assert all(shape == all_[0] for all_ in shapes.values() for shape in all_)


@pytest.mark.parametrize("family", RECORDED)
def test_mbridge_returns_the_same_weights(found, family):
    """mbridge finds the weights under Transformer Engine's own names, without renaming."""
    assert found[family]["different"] == []


def test_the_layers_are_those_of_transformer_engine(found):
    for family, built in found.items():
        assert {"TEDotProductAttention", "TELayerNormColumnParallelLinear"} <= set(built["kinds"])
        grouped = {"TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
        assert grouped <= set(built["kinds"]) or family == "qwen3"
        assert built["grouped"] == (family != "qwen3")
        assert built["dispatcher"] == "alltoall"


def test_each_expert_has_its_own_matrices_in_a_grouped_gemm(found):
    """Shapes: [2 x intermediate, hidden] with the gate first, and [hidden, intermediate]."""
    parameters = found["qwen3_moe"]["parameters"]
    experts = "decoder.layers.3.mlp.experts"
    assert parameters[f"{experts}.linear_fc1.weight15"] == [64, 64]
    assert parameters[f"{experts}.linear_fc2.weight15"] == [64, 32]
    assert f"{experts}.linear_fc1.weight16" not in parameters
