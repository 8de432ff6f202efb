"""Published shapes of large models (tests/data/models), and layouts that they are trained in."""

import json
from typing import Any

from pipeline.config.tree import RunConfig
from tests.paths import ROOT

MODELS = {
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
    "glm-4.5-air": 106_852_245_504,
}
"""Weights by model, those of multi-token prediction not counted."""

LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "30b, 1 node": ("qwen3-30b-a3b", {"nodes": 1, "tp": 4, "ep": 8}),
    "30b, expert-TP": ("qwen3-30b-a3b", {"nodes": 2, "tp": 2, "pp": 2, "ep": 4, "etp": 2}),
    "30b, virtual stages": ("qwen3-30b-a3b", {"nodes": 4, "pp": 4, "vpp": 3, "ep": 8}),
    "235b, uneven stages": (
        "qwen3-235b-a22b",
        {"nodes": 8, "tp": 4, "pp": 8, "ep": 8, "first": 11, "last": 11},
    ),
    "deepseek": (
        "deepseek-v3",
        {"nodes": 16, "tp": 8, "pp": 16, "ep": 8, "first": 3, "last": 2},
    ),
}
"""Model and arguments of `config_of`, by name."""

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def hf_config(model: str) -> dict[str, Any]:
    """config.json of a model."""
    text = (ROOT / "tests" / "data" / "models" / f"{model}.json").read_text()
    config: dict[str, Any] = json.loads(text)
    return config


def config_of(
    nodes: int,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    first: int | None = None,
    last: int | None = None,
    override: dict[str, Any] | None = None,
    tokens: int = 16_384,
    dtype: str = "bfloat16",
    **actor: Any,
) -> RunConfig:
    """Settings of a run on nodes of 8 GPUs; answers of 8,192 tokens to prompts of 2,048."""
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    return RunConfig.model_validate(
        {
            "data": {"max_prompt_length": 2048, "max_response_length": 8192},
            "actor_rollout_ref": {
                "model": {"path": "model"},
                "actor": {
                    "use_dynamic_bsz": True,
                    "ppo_max_token_len_per_gpu": tokens,
                    **actor,
                    "megatron": {
                        "dtype": dtype,
                        "tensor_model_parallel_size": tp,
                        "pipeline_model_parallel_size": pp,
                        "virtual_pipeline_model_parallel_size": vpp,
                        "expert_model_parallel_size": ep,
                        "expert_tensor_parallel_size": etp,
                        "override_transformer_config": {
                            **{name: n for name, n in ends.items() if n is not None},
                            **(override or {}),
                        },
                    },
                },
                "rollout": {"tensor_model_parallel_size": 8},
            },
            "trainer": {"experiment_name": "large", "nnodes": nodes, "n_gpus_per_node": 8},
        }
    )
