"""Models are converted from HF to Megatron and back in every layout; invalid ones are refused.

One torchrun of two ranks and one of one rank run all cases (round_trip.py), and each test reads
their results. If fp32 logits agree with transformers, the config is interpreted correctly and
every weight is in the right place. If files are equal, no weight changes or is lost in the export.
Together, these checks show that an untrained policy is exported exactly as it was loaded.
"""

import json

import pytest

from tests.integration.torchrun import run_ranks
from tests.integration.training_model.round_trip import (
    EXPORTED,
    LAID_OUT,
    LENGTH,
    OWN,
)

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
"""MoE layers of the cases with dense layers; the other cases have four MoE layers."""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the results of each rank, keyed by number of ranks."""
    by_world = {}
    for world in (1, 2):
        folder = tmp_path_factory.mktemp(f"round-trip-{world}")
        run_ranks("tests.integration.training_model.round_trip", world, folder)
        by_world[world] = [json.loads((folder / f"{r}.json").read_text()) for r in range(world)]
    return by_world


@pytest.mark.parametrize(("world", "layout", "case"), LAID_OUT)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_is_bit_identical(found, world, layout, case, dtype):
    """The export contains every tensor with its name, dtype and bits, and every other file.

    In bfloat16, a model with other weights loads the tensors, and an optimizer step with learning
    rate 0 rewrites them from the fp32 masters before the export.
    """
    assert found[world][0][f"{layout}/{case}/{dtype}"]["different"] == []


@pytest.mark.parametrize("case", OWN)
def test_a_model_as_transformers_writes_it_is_loaded_and_exported(found, case):
    """Its config.json lacks fields that mbridge reads, for example Mixtral's head_dim."""
    of_rank = found[1][0][f"dp2/{case}/float32"]
    assert of_rank["different"] == of_rank["wrong_routers"] == []
    assert of_rank["logits_max"] > 1
    assert of_rank["logits_error"] < 1e-4


@pytest.mark.parametrize(("layout", "case"), EXPORTED)
def test_further_exports_are_bit_identical(found, layout, case):
    """The export as a difference from a difference is bit-identical in further layouts.

    These layouts split experts but not dense layers, or split sequences. One model has a layer that
    the trainer does not load but copies from the source.
    """
    for rank in found[2]:
        assert rank[f"{layout}/{case}/exported"] == []


@pytest.mark.parametrize(("world", "layout", "case"), LAID_OUT)
def test_norms_and_biases_do_not_decay(found, world, layout, case):
    """Each parameter is in an optimizer group with the correct weight decay, on every rank.

    Norms and biases decay only in runs that are older than this rule.
    """
    for rank in found[world]:
        assert rank[f"{layout}/{case}/bfloat16"]["wrong_decay"] == []


@pytest.mark.parametrize(("world", "layout", "case"), LAID_OUT)
def test_logits_equal_those_of_transformers(found, world, layout, case):
    """fp32 logits agree with transformers, which uses eager attention.

    All norms, routers and biases have random weights, so that a misplaced weight is detected.
    """
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
    """Together, the ranks have every MoE layer under the number that it has in the HF file.

    Each pipeline stage has only its own layers, also with virtual stages.
    """
    ranks = [rank[f"{layout}/{case}/float32"] for rank in found[world]]
    expected = LAYERS.get(case, [0, 1, 2, 3])
    assert sorted({layer for rank in ranks for layer in rank["routers"]}) == expected
    assert [rank["wrong_routers"] for rank in ranks] == [[]] * world
    if layout.startswith("pp2"):
        first_stage = {"pp2": {0, 1}, "pp2_vpp2": {0, 2}, "pp2_uneven": {0}}[layout]
        assert [set(rank["routers"]) <= first_stage for rank in ranks] == [True, not expected]


@pytest.mark.parametrize(
    ("layout", "case"),
    [
        (layout, case)
        for world, layout, case in LAID_OUT
        if world == 2 and layout in ("dp2", "tp2", "ep2")
        if case in ("deepseek_v3", "deepseek_v3_yarn", "glm4_moe")
    ],
)
def test_the_expert_bias_does_not_count_padding(found, layout, case):
    """Megatron's own _apply_expert_bias raises an exception in this case (see patched.py)."""
    for rank in found[2]:
        counted = rank[f"{layout}/{case}/float32"]["tokens_counted"]
        assert counted == [LENGTH - 5] * 3


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("unknown field", ["recompute_granularty", "did you mean recompute_granularity?"]),
        ("field with its own key", ["bf16", "use actor_rollout_ref.actor.megatron.dtype"]),
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
def test_refusals_name_the_problem(found, case, parts):
    """A setting or weight that Megatron would silently ignore raises an error that names it."""
    message = found[1][0]["refusals"][case]
    assert [part for part in parts if part not in message] == []
