"""Adapts Megatron-core 0.16.1 to run without CUDA. It does nothing if CUDA is available.

Megatron does not have a CPU mode; it uses CUDA devices, streams and generators unconditionally.
Each function below removes one assumption, which its docstring names.
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

from operators.cpu import matmul
from operators.zigzag import Zigzag
from pipeline.config.rules.cuda import REPLACED

Patched = Any
"""A module or object of torch or Megatron that receives undeclared attributes."""

ON_CPU = not torch.cuda.is_available()
CPU = torch.device("cpu")

SETTINGS: dict[str, Any] = {**REPLACED, "attention_backend": AttnBackend.auto}
"""Fields of TransformerConfig with a fixed value on CPU."""

_adapted = False


def adapt() -> None:
    """Make Megatron-core run on CPU, once per process; do nothing if CUDA is available."""
    global _adapted
    if _adapted or not ON_CPU:
        return
    matmul.prepare()
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
    """Replaces torch.cuda.Stream and Event; does nothing, because CPU operations run in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., "_NoStream"]:
        return lambda *args, **kwargs: self


class _CudaFactoriesOnCpu(TorchFunctionMode):
    """Redirects Megatron's hard-coded device='cuda' and .cuda() to the CPU."""

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
    """Replace the CUDA devices, streams and generators, which Megatron uses unconditionally."""
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
    """Mark Transformer Engine (TE) as missing in two modules that do not detect its absence.

    moe_utils tests `te_general_gemm is not None`, but defines the name only if TE can be imported.
    multi_latent_attention assumes that TE is installed if Megatron's wrappers for TE can be
    imported, and then calls isinstance(..., None).
    """
    utils: Patched = moe_utils
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False


def _make_causal_masks_on_cpu() -> None:
    """Create attention's causal mask on the CPU; Megatron creates it on device='cuda'.

    Recomputation creates the mask inside torch.autograd.backward. _CudaFactoriesOnCpu is inactive
    there, because it handles the call to that function itself, and a mode is not active within its
    own handler.
    """
    fused_softmax.get_default_causal_mask = _causal_mask


def _causal_mask(length: int) -> torch.Tensor:
    """Return a mask [length, length], True above the diagonal, where attention must not read."""
    return torch.ones(length, length).triu(1).bool()


def _cut_rotary_embeddings_on_cpu() -> None:
    """For padded rows, select a context-parallel rank's rotary embeddings without pinned memory.

    Megatron's own function pins the index in memory for a GPU. Latent attention also calls this
    function during recomputation.
    """
    for module in (rotary_pos_embedding, yarn_rotary_pos_embedding):
        changed: Patched = module
        changed.get_pos_emb_on_this_cp_rank = _part_of_rotary_embedding


def _part_of_rotary_embedding(
    embedding: torch.Tensor, dimension: int, group: ProcessGroup
) -> torch.Tensor:
    """Select this context-parallel rank's positions along the given dimension of an embedding."""
    part = Zigzag(group.rank(), group.size())
    held = part.held(np.array([0, embedding.shape[dimension]], np.int32))
    return embedding.index_select(dimension, torch.from_numpy(held))


def _allow_torch_norm_under_sequence_parallel() -> None:
    """Let WrappedTorchNorm run under sequence parallelism, which Megatron's class refuses.

    The norm lacks only a mark on its weight. The mark makes finalize_model_grads sum the gradient
    over the tensor-parallel group.
    """

    def marked_norm(
        cls: type[WrappedTorchNorm],
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **_: object,
    ) -> torch.nn.Module:
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"normalization: found {config.normalization} with "
                f"layernorm_zero_centered_gamma={config.layernorm_zero_centered_gamma}, expected "
                "RMSNorm with False, the only normalization that works on CPU; train this model "
                "on GPUs"
            )
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        weight: Patched = norm.weight
        weight.sequence_parallel = config.sequence_parallel
        return norm

    wrapped: Patched = WrappedTorchNorm
    wrapped.__new__ = marked_norm


def _let_optimizer_accept_cpu_tensors() -> None:
    """Make Tensor.type() return CUDA's type names for fp32 and bf16 tensors on the CPU.

    The optimizer distinguishes the types by this string, which contains the device (optimizer.py,
    distrib_optimizer.py, clip_grads.py: 'torch.cuda.FloatTensor'), and uses the string for nothing
    else. A call to type() with a dtype is a conversion, which stays unchanged.
    """
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
