"""Fields that override those of Megatron-core and vLLM: which are refused, unknown or mistyped."""

import dataclasses
import fnmatch
import json
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import TransformerConfig

from pipeline.config.keys import all_keys
from pipeline.config.rules.overrides import (
    DDP,
    ENGINE,
    OPTIMIZER,
    TRANSFORMER,
    Overrides,
    refused_fields,
    set_overrides,
    unknown_fields,
)
from tests.unit.config.settings import OVERRIDE, REPLAY, load, problems


def engine_args() -> type:
    from vllm import EngineArgs

    return EngineArgs


ORIGINALS = {
    "TransformerConfig": (TRANSFORMER, lambda: TransformerConfig),
    "OptimizerConfig": (OPTIMIZER, lambda: OptimizerConfig),
    "DistributedDataParallelConfig": (DDP, lambda: DistributedDataParallelConfig),
    "EngineArgs": (ENGINE, engine_args),
}


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_tables_contain_only_existing_fields_and_settings(name: str):
    group, original = ORIGINALS[name]
    assert group.named.endswith(f"'s {name}")
    names = {field.name for field in dataclasses.fields(original())}
    assert {*group.owned, *group.read} <= names
    assert [like for like in group.refused if not fnmatch.filter(names, like)] == []
    written = {key for text in group.owned.values() for key in text.split(" and ")}
    assert {group.key.removesuffix(".vllm"), *written} <= all_keys().keys()


@pytest.mark.parametrize(
    ("group", "values", "expected"),
    [
        (TRANSFORMER, {"bf16": True}, "has its own setting; use actor_rollout_ref.actor.megatron"),
        (TRANSFORMER, {"num_layers": 2}, "config.json determines it; leave it out"),
        (TRANSFORMER, {"calculate_per_token_loss": True}, "losses are means over tokens; leave"),
        (TRANSFORMER, {"recompute_granularity": "ful"}, "full, selective or null; did you mean"),
        (TRANSFORMER, {"recompute_num_layers": "1"}, "expected an integer or null; correct it"),
        (OPTIMIZER, {"lr": 1.0}, "use actor_rollout_ref.actor.optim.lr instead"),
        (OPTIMIZER, {"optimizer": "sgd"}, "found 'sgd'; the optimizer is Adam; leave it out"),
        (OPTIMIZER, {"decoupled_lr": 0.1}, "one learning rate"),
        (DDP, {"overlap_param_gather": True}, "reads the output layer's weight outside"),
        (DDP, {"nccl_ub": None}, "found null, expected true or false"),
        (DDP, {"use_megatron_fsdp": True}, "Megatron-FSDP is not supported"),
        (ENGINE, {"speculative_config": {}}, "drafted tokens are accepted several at a time"),
        (ENGINE, {"enable_prefix_caching": False}, "stored in blocks next to those of the prefix"),
        (ENGINE, {"quantization": None}, "found null; the engine's weights and log-probs would"),
        (ENGINE, {"enable_dbo": True}, "overwrite each other's routes"),
        (ENGINE, {"kv_cache_dtype": "fp8"}, "shift log-probs away from the trainer's"),
        (ENGINE, {"max_loras": 2}, "adapters are not supported"),
        (ENGINE, {"seed": 3}, "use trainer.seed instead"),
    ],
)
def test_refused_fields_are_named(group: Overrides, values: dict[str, Any], expected: str):
    (problem,) = refused_fields(group, values)
    assert problem.startswith(f"{group.key}.{next(iter(values))}: found ")
    assert expected in problem


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("TransformerConfig", {"moe_router_fusoin": True}, "did you mean moe_router_fusion?"),
        ("TransformerConfig", {"foo": 1}, "not a field of Megatron-core's TransformerConfig;"),
        ("TransformerConfig", {"bias_dropout_fusion": "x"}, "found 'x', expected true or false;"),
        ("TransformerConfig", {"moe_router_dtype": "fp23"}, "did you mean fp32?"),
        ("TransformerConfig", {"window_size": "1"}, "found '1', expected "),
        ("OptimizerConfig", {"adam_epz": 1.0}, "did you mean adam_eps?"),
        ("OptimizerConfig", {"pin_cpu_grads": 1}, "found 1, expected true or false"),
        ("DistributedDataParallelConfig", {"check_for_nan": True}, "did you mean check_for_nan_in"),
        ("EngineArgs", {"enable_chunked_prefil": True}, "mean enable_chunked_prefill?"),
    ],
)
def test_unknown_and_mistyped_fields_are_named(name: str, values: dict[str, Any], expected: str):
    group, original = ORIGINALS[name]
    (problem,) = unknown_fields(group, original(), values)
    assert problem.startswith(f"{group.key}.{next(iter(values))}: ")
    assert expected in problem


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "TransformerConfig",
            {
                "recompute_granularity": "selective",
                "recompute_modules": ["moe"],
                "moe_aux_loss_coeff": 0.01,
                "attention_backend": "flash",
                "recompute_num_layers": None,
            },
        ),
        ("OptimizerConfig", {"optimizer_offload_fraction": 1, "optimizer_cpu_offload": True}),
        ("EngineArgs", {"compilation_config": {"cudagraph_mode": "PIECEWISE"}, "block_size": 1}),
    ],
)
def test_other_fields_pass(name: str, values: dict[str, Any]):
    group, original = ORIGINALS[name]
    assert [*refused_fields(group, values), *unknown_fields(group, original(), values)] == []


@pytest.mark.parametrize("value", [True, 1.5, "x", [["x"]], {"a": 1}])
def test_a_wrong_type_is_a_problem_not_a_crash(tmp_path, value):
    """Other rules read the same fields and must not crash either, so the test sets all fields."""
    names = [field.name for field in dataclasses.fields(TransformerConfig)]
    fields = json.dumps(dict.fromkeys(names, value))
    assert problems(tmp_path, f"{REPLAY}.mode=R2", f"{OVERRIDE}={fields}")


def test_the_critics_optimizer_has_its_own_keys(tmp_path):
    override = "critic.optim.override_optimizer_config.lr=1.0"
    ((group, values),) = set_overrides(load(tmp_path, override).config)
    (problem,) = refused_fields(group, values)
    assert problem.startswith("critic.optim.override_optimizer_config.lr: found 1.0, which has")
    assert problem.endswith("use critic.optim.lr instead")
