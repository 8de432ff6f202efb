"""Rules for settings that require CUDA: on CPU they are refused, not ignored."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config.actor import Actor, Megatron
from pipeline.config.rules.overrides import DDP, OPTIMIZER, OVERRIDE, TRANSFORMER
from pipeline.config.rules.precision import precision_aware
from pipeline.config.rules.rates import OPTIM
from pipeline.config.tree import RunConfig
from pipeline.errors import shown
from pipeline.model.families import expert_width, moe_geometry

_OF_OPTIMIZER = (
    "optimizer_cpu_offload pin_cpu_grads pin_cpu_params overlap_cpu_optimizer_d2h_h2d "
    "use_torch_optimizer_for_cpu_offload store_param_remainders"
)
_OF_DDP = (
    "nccl_ub pad_buckets_for_high_nccl_busbw reduce_scatter_with_fp32_accumulation "
    "overlap_grad_reduce"
)
_OF_MODEL = (
    "batch_invariant_mode cpu_offloading cuda_graph_impl defer_embedding_wgrad_compute "
    "delay_wgrad_compute disable_bf16_reduced_precision_matmul enable_autocast enable_cuda_graph "
    "external_cuda_graph fine_grained_activation_offloading fp4 fp8 fused_single_qkv_rope "
    "memory_efficient_layer_norm moe_enable_deepep moe_router_fusion "
    "overlap_moe_expert_parallel_comm symmetric_ar_type tp_comm_overlap use_kitchen "
    "use_kitchen_attention use_te_activation_func use_te_rng_tracker"
)
"""Fields of TransformerConfig that the layers on CPU ignore, or with which these layers cannot be
built."""
REPLACED = {
    # Grouped GEMM is a CUDA kernel.
    "moe_grouped_gemm": False,
    # The all-to-all dispatcher passes its split sizes as tensors, which Gloo refuses.
    "moe_token_dispatcher_type": "allgather",
    # Megatron refuses this field with the all-gather dispatcher. When the field is off, stages use
    # the lengths that each schedule receives.
    "variable_seq_lengths": False,
    # This field works only with the all-to-all dispatcher and CUDA streams.
    "moe_shared_expert_overlap": False,
    "moe_permute_fusion": False,
    # This field selects Transformer Engine's kernels through environment variables. The variables
    # would still be set for a second model of a different family in the same process.
    "attention_backend": "auto",
    # Fusions and kernels from CUDA, Apex or Transformer Engine.
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
}
"""Fields of TransformerConfig that have a fixed value on CPU, and their values."""

_OF_KERNELS = 32
HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""The head sizes of vLLM's CPU attention; a test compares them with vLLM's list."""
_OF_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""The only sizes for which vLLM's CPU kernel for latent attention is compiled."""
_APEX = "Apex, built with --cpp_ext and --cuda_ext (https://github.com/NVIDIA/apex)"
_DEEP_EP = "DeepEP (https://github.com/deepseek-ai/DeepEP)"
_PACKAGES = {
    ("gradient_accumulation_fusion", True): ("fused_weight_gradient_mlp_cuda", _APEX),
    ("moe_enable_deepep", True): ("deep_ep", _DEEP_EP),
    ("moe_token_dispatcher_type", "flex"): ("deep_ep", _DEEP_EP),
}
"""Values of TransformerConfig's fields with which Megatron-core imports a package that Retrace does
not install: the package's module, and its name."""
_OFF = (None, False, "none")
"""The values of fields that are not in use."""


def chosen(latent: bool) -> dict[str, Any]:
    """Return the fields of TransformerConfig whose default on GPUs differs from Megatron-core's.

    Fusing the accumulation of gradients (gradient_accumulation_fusion) stays off, because the
    output layer then needs Apex. `latent` is true for a model with multi-head latent attention.
    """
    return {
        # Without fusion, the tokens' outputs are added with atomics, so that a repeated pass
        # differs in its last bits. Transformer Engine's fused kernels add in a fixed order.
        "moe_permute_fusion": True,
        # One kernel in place of a rotation per sequence of the micro-batch. For latent attention,
        # Megatron-core allows it only with YaRN.
        "apply_rope_fusion": not latent,
    }


def cuda_problems(actor: Actor) -> Iterator[str]:
    """Yield problems with settings that a run on CPU cannot use."""
    if precision_aware(actor):
        yield (
            f"{OPTIM}.use_precision_aware_optimizer: found True, but it belongs to Transformer "
            "Engine, which requires CUDA; write false, or train on GPUs"
        )
    groups = (
        (OPTIMIZER, actor.optim.override_optimizer_config, _OF_OPTIMIZER),
        (DDP, actor.megatron.override_ddp_config, _OF_DDP),
        (TRANSFORMER, actor.megatron.override_transformer_config, _OF_MODEL),
    )
    for group, values, only in groups:
        for name in only.split():
            if (value := values.get(name)) not in _OFF:
                yield (
                    f"{group.key}.{name}: found {shown(value)}, but this option requires CUDA; "
                    "leave it out, or train on GPUs"
                )
    if actor.megatron.override_transformer_config.get("cp_comm_type") == "p2p":
        yield (
            f"{OVERRIDE}.cp_comm_type: found 'p2p', but on CPU context-parallel ranks gather keys "
            "and values; leave it out, or train on GPUs"
        )


def cuda_notes(megatron: Megatron) -> Iterator[str]:
    """Yield a note on each field that has a different value on CPU."""
    for name, value in megatron.override_transformer_config.items():
        if value is not None and REPLACED.get(name, value) != value:
            yield f"{OVERRIDE}.{name}: {value} requires CUDA; on CPU the value is {REPLACED[name]}"


def needed_modules(megatron: Megatron) -> Iterator[tuple[str, str, str]]:
    """Yield the packages that the settings require on GPUs, in addition to those of Retrace.

    Each package is a triple: the setting with its value, the module to import, and the name.
    """
    for (name, value), (module, package) in _PACKAGES.items():
        if megatron.override_transformer_config.get(name) == value:
            yield f"{OVERRIDE}.{name}={value}", module, package


def cpu_engine_problems(config: RunConfig, hf_config: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield problems with the model in vLLM's CPU build, if the run has an engine.

    vLLM's CPU kernels for experts (CPUUnquantizedExperts and its subclasses) require multiples of
    32. They refuse any other hidden size. They pad experts of any other width, after which no later
    policy can be loaded.

    Args:
        config: The settings.
        hf_config: The model's config.json; None if it is not known.
    """
    policy = config.actor_rollout_ref
    if hf_config is None or policy.actor.router_replay.replay_file is not None:
        return
    tp = policy.rollout.tensor_model_parallel_size
    if tp > 1:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size: found {tp}, expected 1 on CPU; "
            "start more rollout workers instead (launch.rollout_workers)"
        )
    path = "actor_rollout_ref.model.path: config.json has"
    latent = [hf_config.get(name) for name in _OF_LATENT]
    if None not in latent:
        if latent != list(_OF_LATENT.values()):
            found, right = (
                " and ".join(f"{name}={size}" for name, size in zip(_OF_LATENT, sizes, strict=True))
                for sizes in (latent, _OF_LATENT.values())
            )
            yield (
                f"{path} {found}, but vLLM's CPU kernel for latent attention supports only "
                f"{right}; use another model, or GPUs"
            )
    elif (head := hf_config.get("head_dim")) is not None and head not in HEADS:
        yield (
            f"{path} a head size (head_dim, or hidden_size / num_attention_heads) of {head}, but "
            f"vLLM's CPU kernels for attention support only {', '.join(map(str, HEADS))}; use "
            "another model, or GPUs"
        )
    if moe_geometry(hf_config) is None:
        return
    for name in ("hidden_size", expert_width(hf_config)):
        size = hf_config.get(name)
        if isinstance(size, int) and size % _OF_KERNELS:
            yield (
                f"{path} {name}={size}, but vLLM's CPU kernels for experts require a multiple of "
                f"{_OF_KERNELS}; use another model, or GPUs"
            )
