"""The parallel layouts that two ranks of this machine can run."""

from typing import Any

from pipeline.config.actor import Actor, Megatron, Optim

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2_vpp2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "pp2_uneven": {
        "pipeline_model_parallel_size": 2,
        "override_transformer_config": {"num_layers_in_first_pipeline_stage": 1},
    },
    "ep2": {"expert_model_parallel_size": 2},
}
"""Name -> sizes; TP2 is with sequence parallelism. On one rank `dp2` is the layout of one rank."""

OF_SEQUENCES: dict[str, dict[str, Any]] = {"cp2": {"context_parallel_size": 2}}
"""Layouts that cut sequences, which the passes of these tests do not: models are only loaded."""


OPTIONS: dict[str, dict[str, Any]] = {
    "dp2_bf16_gradients": {"override_ddp_config": {"grad_reduce_in_fp32": False}},
}
"""Layouts with options of Megatron that change how they train."""


def actor_of(layout: str, **megatron: Any) -> Actor:
    """Training settings of a layout, with further megatron settings."""
    sizes = (LAYOUTS | OPTIONS | OF_SEQUENCES)[layout]
    return Actor(megatron=Megatron(**sizes, **megatron), optim=Optim(lr=1e-3))
