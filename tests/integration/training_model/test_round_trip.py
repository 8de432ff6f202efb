"""HF -> Megatron -> HF in every layout, and what is refused.

One torchrun of two ranks and one of one rank run all cases (round_trip.py); each test reads what
they found. Logits in fp32 equal to transformers' show that the config was understood and every
weight is in its place; equal files show that no weight is changed or lost on the way back; together
a policy that is exported untrained is the policy that was read.
"""

import json

import pytest

from tests.integration.torchrun import run_ranks
from tests.integration.training_model.layouts import LAYOUTS
from tests.integration.training_model.round_trip import ALONE, CASES, DENSE, LENGTH

pytestmark = pytest.mark.integration

LAYERS = {
    "qwen3_moe_dense_first": [1, 2, 3],
    "deepseek_v3": [1, 2, 3],
    "deepseek_v3_yarn": [1, 2, 3],
    "glm4_moe": [1, 2, 3],
    "glm4_moe_grouped": [1, 2, 3],
    "llama": [],
    "qwen2": [],
    "qwen3": [],
    "qwen3_tied": [],
}
"""MoE layers of the cases that have dense ones; the others have four."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """By number of ranks: what each rank found."""
    by_world = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"round-trip-{world}")
        run_ranks("tests.integration.training_model.round_trip", world, folder)
        by_world[world] = [json.loads((folder / f"{r}.json").read_text()) for r in range(world)]
    return by_world


LAID_OUT = [
    *((1, "dp2", name) for name in CASES),
    *(
        (2, layout, name)
        for layout in LAYOUTS
        for name in CASES
        if not (layout == "ep2" and name in DENSE) and name not in ALONE
    ),
]
"""(number of ranks, layout, case)."""


@pytest.mark.parametrize(("world", "layout", "case"), LAID_OUT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_is_bit_identical(found, world, layout, case, dtype):
    """Every tensor's name, dtype and bits, and every other file, come back; in bfloat16 by way of a
    model of other weights that loads them, the fp32 masters, and an optimizer step of no size."""
    assert found[world][0][f"{layout}/{case}/{dtype}"]["different"] == []


@pytest.mark.parametrize(("world", "layout", "case"), LAID_OUT)
def test_norms_and_biases_do_not_decay(found, world, layout, case):
    """On every rank, by what group of the optimizer each of its parameters is in; only a run that
    is older than the rule decays them."""
    for rank in found[world]:
        assert rank[f"{layout}/{case}/bfloat16"]["wrong_decay"] == []


@pytest.mark.parametrize(("world", "layout", "case"), LAID_OUT)
def test_logits_are_those_of_transformers(found, world, layout, case):
    """fp32 against transformers' own model, eager attention; random weights of every norm, router
    and bias, so that nothing is in a wrong place unseen."""
    on_last_stage = [
        rank[f"{layout}/{case}/float32"]
        for rank in found[world]
        if "logits_error" in rank[f"{layout}/{case}/float32"]
    ]
    assert on_last_stage
    for of_rank in on_last_stage:
        assert of_rank["logits_max"] > 1
        assert of_rank["logits_error"] < 1e-4


@pytest.mark.parametrize(("world", "layout", "case"), LAID_OUT)
def test_routers_are_found_by_model_index(found, world, layout, case):
    """The ranks together have every MoE layer, each under the number the HF file gives its weights;
    every pipeline stage has its own, virtual stages included."""
    ranks = [rank[f"{layout}/{case}/float32"] for rank in found[world]]
    expected = LAYERS.get(case, [0, 1, 2, 3])
    assert sorted({layer for rank in ranks for layer in rank["routers"]}) == expected
    assert [rank["wrong_routers"] for rank in ranks] == [[]] * world
    if layout.startswith("pp2"):
        first_stage = {"pp2": {0, 1}, "pp2_vpp2": {0, 2}, "pp2_uneven": {0}}[layout]
        assert [set(rank["routers"]) <= first_stage for rank in ranks] == [True, not expected]


@pytest.mark.parametrize("layout", ["dp2", "tp2", "ep2"])
@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v3_yarn", "glm4_moe"])
def test_padding_is_not_counted_for_the_expert_bias(found, layout, case):
    """With Megatron's own _apply_expert_bias this is an exception (see patched.py)."""
    for rank in found[2]:
        counted = rank[f"{layout}/{case}/float32"]["tokens_counted"]
        assert counted == [LENGTH - 5] * 3


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("unknown field", ["recompute_granularty", "did you mean recompute_granularity?"]),
        ("field with a key of its own", ["bf16", "write actor_rollout_ref.actor.megatron.dtype"]),
        ("loss per token", ["calculate_per_token_loss"]),
        ("dropout", ["hidden_dropout: found 0.1", "write 0.0"]),
        ("refused by Megatron", ["override_transformer_config", "Megatron-core refuses"]),
        ("expert-TP", ["expert_tensor_parallel_size: found 2", "write 1 or null"]),
        ("ranks", ["training ranks: found 1", "tensor_model_parallel_size=2"]),
        ("virtual pipeline", ["pipeline_model_parallel_size is 1"]),
        ("model type", ["config.json", "'gpt3'", "deepseek_v3, glm4_moe, llama"]),
        ("RoPE type", ["config.json", "'linear'", "default"]),
        ("FP8", ["config.json", "quantization_config", "bfloat16"]),
        ("missing weight", ["model.norm.weight"]),
        ("surplus weight", ["model.layers.0.self_attn.o_proj.bias"]),
    ],
)
def test_refusals_name_what_is_wrong(found, case, parts):
    """What would be lost in silence on the way to Megatron is an error that names it."""
    message = found[1][0]["refusals"][case]
    assert [part for part in parts if part not in message] == []
