"""The parallel layouts that two ranks on this machine can run."""

from typing import Any

from operators.cpu.without_cuda import ON_CPU
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
"""The sizes of each layout.

tp2 uses sequence parallelism. With only one rank, a model with the layout `dp2` is not split.
"""

OF_SEQUENCES: dict[str, dict[str, Any]] = {"cp2": {"context_parallel_size": 2}}
"""Layouts that split sequences.

The tests cannot run passes with split sequences, so they only load models with these layouts.
"""

OF_EXPERTS: dict[str, dict[str, Any]] = {"etp2": {"expert_tensor_parallel_size": 2}}
"""Layouts that split only experts; they differ from `tp2` only in the export."""

OPTIONS: dict[str, dict[str, Any]] = {
    "dp2_bf16_gradients": {"override_ddp_config": {"grad_reduce_in_fp32": False}},
}
"""Layouts with Megatron options that change training."""


ON_GPU: dict[str, Any] = {"attention_backend": "auto"}
"""Megatron fields for GPUs.

mbridge sets a fused backend for DeepSeek. That backend does not support float32, and Megatron
selects it through environment variables that it refuses to change for a later model in the same
process.
"""


def actor_of(layout: str, **megatron: Any) -> Actor:
    """Return the training settings for a layout, with further megatron settings."""
    sizes = dict((LAYOUTS | OPTIONS | OF_SEQUENCES | OF_EXPERTS)[layout])
    if not ON_CPU:
        sizes["override_transformer_config"] = ON_GPU | sizes.get("override_transformer_config", {})
    return Actor(megatron=Megatron(**sizes, **megatron), optim=Optim(lr=1e-3))
