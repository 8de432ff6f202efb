"""The published shapes of large models (tests/data/models), and layouts for training them."""

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
"""The number of weights in each model, excluding those for multi-token prediction."""

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
"""The model, and the arguments of `config_of`, for each layout, keyed by name."""

FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def hf_config(model: str) -> dict[str, Any]:
    """Return the config.json of a model."""
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
    """Return the settings of a run on nodes with 8 GPUs each.

    Prompts have up to 2,048 tokens, and responses up to 8,192.

    Args:
        nodes: The number of nodes.
        tp, pp, vpp, ep, etp: Sizes of the parallel layout. If vpp or etp is None, Megatron's
            default applies.
        first: Number of layers in the first pipeline stage; None if it has as many as the others.
        last: Number of layers in the last pipeline stage; None if it has as many as the others.
        override: Further settings of override_transformer_config.
        tokens: The token budget of a pack.
        dtype: The type of the weights.
        actor: Further settings of the actor.
    """
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
