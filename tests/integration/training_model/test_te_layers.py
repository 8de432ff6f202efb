"""What is built on GPUs: Transformer Engine's layers, under the names that mbridge expects.

Built for real by Megatron-core, over a stub (tests/transformer_engine_stub.py) that has Transformer
Engine's parameters and no kernels. What is computed is a GPU's affair: scripts/gpu_hour.sh.
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
"""By family: how many parameters of a name there are, and their shape. Every layer `{l}`, every
expert `{e}`. At TP1, from Transformer Engine 2.11's sources."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("te")
    run_ranks("tests.integration.training_model.te_layers", 1, folder)
    return dict(json.loads((folder / "found.json").read_text()))


@pytest.mark.parametrize("family", RECORDED)
def test_parameters_are_those_on_record(found, family):
    shapes: dict[str, list[list[int]]] = {}
    for name, shape in found[family]["parameters"].items():
        pattern = re.sub(r"weight\d+$", "weight{e}", re.sub(r"layers\.\d+", "layers.{l}", name))
        shapes.setdefault(pattern, []).append(shape)
    told = {name: f"{len(all_)} x {all_[0]}" for name, all_ in shapes.items()}
    assert told == RECORDED[family]
    assert all(shape == all_[0] for all_ in shapes.values() for shape in all_)


@pytest.mark.parametrize("family", RECORDED)
def test_weights_come_back_from_mbridge_as_they_were(found, family):
    """By the names of Transformer Engine's layers, renamed by nobody."""
    assert found[family]["different"] == []


def test_layers_are_transformer_engines(found):
    for family, built in found.items():
        assert {"TEDotProductAttention", "TELayerNormColumnParallelLinear"} <= set(built["kinds"])
        grouped = {"TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear"}
        assert grouped <= set(built["kinds"]) or family == "qwen3"
        assert built["grouped"] == (family != "qwen3")
        assert built["dispatcher"] == "alltoall"


def test_each_expert_has_a_matrix_of_its_own_in_a_grouped_gemm(found):
    """[2 x intermediate, hidden] with the gate first, and [hidden, intermediate]: no transposes."""
    parameters = found["qwen3_moe"]["parameters"]
    experts = "decoder.layers.3.mlp.experts"
    assert parameters[f"{experts}.linear_fc1.weight15"] == [64, 64]
    assert parameters[f"{experts}.linear_fc2.weight15"] == [64, 32]
    assert f"{experts}.linear_fc1.weight16" not in parameters
