"""Settings that do nothing, or cannot be, without CUDA: refused on CPU, not ignored."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.actor import Actor, Megatron
from pipeline.config.rules.megatron_options import DDP, OPTIMIZER, precision_aware
from pipeline.config.rules.rates import OPTIM
from pipeline.config.rules.transformer_rules import OVERRIDE
from pipeline.config.tree import RunConfig
from pipeline.model.geometry import Geometry

_IN_MEMORY = "on CPU the optimizer's state is in the host's memory already"
_ENGINE = "it is Transformer Engine's, which needs CUDA"
_OF_OPTIMIZER = {
    "optimizer_cpu_offload": _IN_MEMORY,
    "pin_cpu_grads": _IN_MEMORY,
    "pin_cpu_params": _IN_MEMORY,
    "store_param_remainders": _ENGINE,
    "overlap_cpu_optimizer_d2h_h2d": _IN_MEMORY,
    "use_torch_optimizer_for_cpu_offload": _IN_MEMORY,
}
_OF_DDP = {
    "nccl_ub": "on CPU ranks talk by Gloo",
    "pad_buckets_for_high_nccl_busbw": "on CPU ranks talk by Gloo",
    "overlap_grad_reduce": "on CPU nothing runs beside the backward pass, and an expert without "
    "tokens has no gradient to wait for",
    "reduce_scatter_with_fp32_accumulation": "on CPU ranks talk by Gloo",
}
REPLACED = {
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "variable_seq_lengths": False,
    "moe_shared_expert_overlap": False,
    "moe_permute_fusion": False,
    "attention_backend": "auto",
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
}
"""Fields of TransformerConfig that have a fixed value on CPU, and that value."""

_OF_KERNELS = 32
_OF_MODEL = {"cpu_offloading": _ENGINE, "fine_grained_activation_offloading": _ENGINE}


def cuda_problems(actor: Actor) -> Iterator[str]:
    """Yield what a run on CPU must leave out."""
    if precision_aware(actor):
        yield (
            f"{OPTIM}.use_precision_aware_optimizer: found true, but {_ENGINE}; write false, or "
            "train on GPUs"
        )
    for key, values, only in (
        (OPTIMIZER.key, actor.optim.override_optimizer_config, _OF_OPTIMIZER),
        (DDP.key, actor.megatron.override_ddp_config, _OF_DDP),
        (OVERRIDE, actor.megatron.override_transformer_config, _OF_MODEL),
    ):
        for name, why in only.items():
            if values.get(name) is True:
                yield f"{key}.{name}: found True, but {why}; leave it out, or train on GPUs"
    if actor.megatron.override_transformer_config.get("cp_comm_type") == "p2p":
        yield (
            f"{OVERRIDE}.cp_comm_type: found 'p2p', but on CPU context-parallel ranks gather keys "
            "and values; leave it out, or train on GPUs"
        )


def cuda_notes(megatron: Megatron) -> Iterator[str]:
    """Yield a note on each field whose value is another one on CPU."""
    for name, value in megatron.override_transformer_config.items():
        if value is not None and REPLACED.get(name, value) != value:
            yield f"{OVERRIDE}.{name}: {value} needs CUDA; on CPU it is {REPLACED[name]}"


def cpu_engine_problems(
    config: RunConfig, hf_config: Mapping[str, Any] | None, geometry: Geometry | None
) -> Iterator[str]:
    """Yield what vLLM's CPU build cannot do with a model's experts, if the run has an engine.

    Its kernels (CPUUnquantizedExperts and its subclasses) take multiples of 32: they refuse another
    hidden size, and pad another width of experts, of which no later policy can be loaded.
    """
    policy = config.actor_rollout_ref
    if hf_config is None or geometry is None or policy.actor.router_replay.replay_file is not None:
        return
    # Mixtral names the width of its experts as other models name that of their dense layers.
    width = "moe_intermediate_size" if "moe_intermediate_size" in hf_config else "intermediate_size"
    whole_experts = policy.rollout.engine_kwargs.vllm.get("enable_expert_parallel") is True
    tp = 1 if whole_experts else policy.rollout.tensor_model_parallel_size
    for name, multiple in (("hidden_size", _OF_KERNELS), (width, _OF_KERNELS * tp)):
        found = hf_config.get(name)
        if isinstance(found, int) and found % multiple:
            cut = f" ({_OF_KERNELS} times rollout.tensor_model_parallel_size={tp})"
            yield (
                f"actor_rollout_ref.model.path: config.json has {name}={found}, but vLLM's kernels "
                f"of experts on CPU need a multiple of {multiple}"
                f"{cut if multiple > _OF_KERNELS else ''}; use another model, or GPUs"
            )
