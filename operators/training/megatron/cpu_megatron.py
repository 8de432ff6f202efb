"""Adaptation of Megatron-core 0.16.1 to run without CUDA. It does nothing where CUDA is available.

Megatron has no CPU mode: it names CUDA devices, streams and generators unconditionally. Each
function below undoes one assumption, which its docstring names. The layers that need no Transformer
Engine are in local_layers.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import numpy as np
import torch
from megatron.core.fusions import fused_softmax
from megatron.core.models.common.embeddings import (
    rotary_pos_embedding,
    yarn_rotary_pos_embedding,
)
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.distributed import ProcessGroup
from torch.overrides import TorchFunctionMode

from operators.training.batches.zigzag import Zigzag

Patched = Any
"""A module or object of torch or Megatron that receives undeclared attributes."""

ON_CPU = not torch.cuda.is_available()
CPU = torch.device("cpu")

SETTINGS: dict[str, Any] = {
    # Grouped GEMM is a CUDA kernel.
    "moe_grouped_gemm": False,
    # The all-to-all dispatcher passes its split sizes as tensors, which gloo refuses.
    "moe_token_dispatcher_type": "allgather",
    # Refused with that dispatcher; without it, stages use the lengths given to each schedule.
    "variable_seq_lengths": False,
    # Works with the all-to-all dispatcher and CUDA streams only.
    "moe_shared_expert_overlap": False,
    "moe_permute_fusion": False,
    # The field chooses among Transformer Engine's kernels by environment variables, which a second
    # model of another family in the process would find set.
    "attention_backend": AttnBackend.auto,
    # Fusions and kernels of CUDA, Apex or Transformer Engine.
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
}
"""Fields of TransformerConfig with a fixed value on CPU."""

_adapted = False


def adapt() -> None:
    """Make Megatron-core run on CPU, once per process; do nothing where CUDA is available."""
    global _adapted
    if _adapted or not ON_CPU:
        return
    _send_cuda_calls_to_cpu()
    enter: Callable[[], object] = _CudaFactoriesOnCpu().__enter__
    enter()
    _mark_transformer_engine_missing()
    _allow_torch_norm_under_sequence_parallel()
    _let_optimizer_accept_cpu_tensors()
    _make_causal_masks_on_cpu()
    _cut_rotary_embeddings_on_cpu()
    _adapted = True


class _NoStream:
    """Replaces torch.cuda.Stream and Event: on CPU every operation is already ordered."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_NoStream"]:
        return lambda *args, **kwargs: self


class _CudaFactoriesOnCpu(TorchFunctionMode):
    """Redirects Megatron's literals device='cuda' and .cuda() to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs and str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **(kwargs or {}))


def _send_cuda_calls_to_cpu() -> None:
    """Megatron's calls of CUDA devices, streams and generators are unconditional."""
    cuda: Patched = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NoStream()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    module: Patched = torch.nn.Module
    module.cuda = lambda self, device=None: self
    # Activation checkpointing saves and restores the generator through these two names.
    generator: Patched = megatron_random
    generator._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    generator._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _mark_transformer_engine_missing() -> None:
    """Two modules do not notice that TE is missing: moe_utils tests `te_general_gemm is not None`
    but defines it only when TE imports, and multi_latent_attention mistakes the wrappers' import
    for TE's, then calls isinstance(..., None)."""
    utils: Patched = moe_utils
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False


def _make_causal_masks_on_cpu() -> None:
    """Attention makes its mask on device='cuda'. Recomputation does so inside
    torch.autograd.backward, where _CudaFactoriesOnCpu is off: a mode is not active within its own
    handler, which handles every call of a torch function."""
    fused_softmax.get_default_causal_mask = _causal_mask


def _causal_mask(length: int) -> torch.Tensor:
    """A mask [length, length], True above the diagonal, which attention must not read."""
    return torch.ones(length, length).triu(1).bool()


def _cut_rotary_embeddings_on_cpu() -> None:
    """Context-parallel ranks take their part of padded rows' rotary embeddings by an index that
    Megatron pins in memory for a GPU. Latent attention does so in recomputation too."""
    for module in (rotary_pos_embedding, yarn_rotary_pos_embedding):
        changed: Patched = module
        changed.get_pos_emb_on_this_cp_rank = _part_of_rotary_embedding


def _part_of_rotary_embedding(
    embedding: torch.Tensor, dimension: int, group: ProcessGroup
) -> torch.Tensor:
    """The positions of this context-parallel rank along a dimension of whole rows."""
    part = Zigzag(group.rank(), group.size())
    held = part.held(np.array([0, embedding.shape[dimension]], np.int32))
    return embedding.index_select(dimension, torch.from_numpy(held))


def _allow_torch_norm_under_sequence_parallel() -> None:
    """WrappedTorchNorm refuses sequence parallelism; it lacks only the mark on its weight by which
    finalize_model_grads sums the gradient over the tensor-parallel group."""

    def marked_norm(
        cls: type[WrappedTorchNorm],
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **_: object,
    ) -> torch.nn.Module:
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"normalization: found {config.normalization} with zero-centred weights "
                f"{config.layernorm_zero_centered_gamma}, expected RMSNorm without, the only one "
                "of torch that is made to work on CPU; train this model on GPUs"
            )
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        weight: Patched = norm.weight
        weight.sequence_parallel = config.sequence_parallel
        return norm

    wrapped: Patched = WrappedTorchNorm
    wrapped.__new__ = marked_norm


def _let_optimizer_accept_cpu_tensors() -> None:
    """The optimizer distinguishes fp32 from bf16 by Tensor.type(), whose string names the device
    (optimizer.py, distrib_optimizer.py, clip_grads.py: 'torch.cuda.FloatTensor'). It reads nothing
    else from that string, so CPU tensors return the CUDA spelling. A call with a dtype is a
    conversion and stays unchanged."""
    spelling = {
        torch.float32: "torch.cuda.FloatTensor",
        torch.bfloat16: "torch.cuda.BFloat16Tensor",
    }
    tensor: Patched = torch.Tensor
    real_type = tensor.type

    def type_with_cuda_spelling(
        self: torch.Tensor, dtype: object = None, *args: object, **kwargs: object
    ) -> object:
        if dtype is None and self.dtype in spelling:
            return spelling[self.dtype]
        return real_type(self, dtype, *args, **kwargs)

    tensor.type = type_with_cuda_spelling
