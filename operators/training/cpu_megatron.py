"""What Megatron-core 0.16.1 needs to run without CUDA. Nothing here happens where CUDA is.

Megatron has no CPU mode: it names CUDA devices, streams and generators unconditionally. Each
function below undoes one assumption and says which. The layers that need no Transformer Engine
are in local_layers.
"""

import contextlib
from typing import Any

import megatron.core.tensor_parallel.random as megatron_random
import torch
from megatron.core.fusions import fused_softmax
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch.overrides import TorchFunctionMode

ON_CPU = not torch.cuda.is_available()
CPU = torch.device("cpu")

SETTINGS: dict[str, Any] = {
    # Grouped GEMM is a CUDA kernel.
    "moe_grouped_gemm": False,
    # The all-to-all dispatcher passes its split sizes as tensors; gloo refuses.
    "moe_token_dispatcher_type": "allgather",
    # Refused with that dispatcher; stages then trust the lengths given to each schedule.
    "variable_seq_lengths": False,
    # Works with the all-to-all dispatcher and CUDA streams only.
    "moe_shared_expert_overlap": False,
    "moe_permute_fusion": False,
    # Chooses among Transformer Engine's kernels by environment variables; a second model of another
    # family in the process would find them set.
    "attention_backend": AttnBackend.auto,
    # Fusions and kernels of CUDA, Apex or Transformer Engine.
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
}
"""Fields of TransformerConfig that have one value on CPU."""

_adapted = False


def adapt() -> None:
    """Make Megatron-core run on CPU; once per process, and never where CUDA is."""
    global _adapted
    if _adapted or not ON_CPU:
        return
    _send_cuda_calls_to_cpu()
    _CudaFactoriesOnCpu().__enter__()
    _say_transformer_engine_is_missing()
    _allow_torch_norm_under_sequence_parallel()
    _let_optimizer_accept_cpu_tensors()
    _make_causal_masks_on_cpu()
    _adapted = True


class _NoStream:
    """Stands in for torch.cuda.Stream and Event: on CPU every operation is already ordered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self


class _CudaFactoriesOnCpu(TorchFunctionMode):
    """Megatron writes device='cuda' and .cuda() as literals; both mean 'here'."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs and str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = {**kwargs, "device": CPU}
        return func(*args, **(kwargs or {}))


def _send_cuda_calls_to_cpu() -> None:
    """Device, stream and generator calls are unconditional in Megatron."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.synchronize = cuda.empty_cache = lambda *args, **kwargs: None
    cuda.Stream = cuda.Event = _NoStream
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: _NoStream()
    cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    module: Any = torch.nn.Module
    module.cuda = lambda self, device=None: self
    # Activation checkpointing saves and restores the generator through these two names.
    generator: Any = megatron_random
    generator._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    generator._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)


def _say_transformer_engine_is_missing() -> None:
    """Two modules do not notice: moe_utils asks `te_general_gemm is not None` but defines it only
    when TE imports, and multi_latent_attention takes the wrappers' import for TE's, then asks
    isinstance(..., None)."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    multi_latent_attention.HAVE_TE = False


def _make_causal_masks_on_cpu() -> None:
    """Attention makes its mask on device='cuda'. Recomputation does so inside
    torch.autograd.backward, where the mode above is off: it is not active within its own
    handler, which every call of a torch function goes through."""
    fused_softmax.get_default_causal_mask = _causal_mask


def _causal_mask(length: int) -> torch.Tensor:
    """True above the diagonal, where attention must not look."""
    return torch.ones(length, length).triu(1).bool()


def _allow_torch_norm_under_sequence_parallel() -> None:
    """WrappedTorchNorm refuses sequence parallelism; all it lacks is the mark on its weight that
    makes finalize_model_grads sum the gradient over the tensor-parallel group."""

    def marked_norm(
        cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> torch.nn.Module:
        if config.normalization != "RMSNorm" or config.layernorm_zero_centered_gamma:
            raise ValueError(
                f"normalization: found {config.normalization} with zero-centred weights "
                f"{config.layernorm_zero_centered_gamma}, expected RMSNorm without, the only one "
                "of torch that is made to work on CPU; train this model on GPUs"
            )
        norm = torch.nn.RMSNorm(hidden_size, eps=eps)
        norm.weight.sequence_parallel = config.sequence_parallel
        return norm

    wrapped: Any = WrappedTorchNorm
    wrapped.__new__ = marked_norm


def _let_optimizer_accept_cpu_tensors() -> None:
    """The optimizer tells fp32 from bf16 by Tensor.type(), whose string names the device
    (optimizer.py, distrib_optimizer.py, clip_grads.py: 'torch.cuda.FloatTensor'). It reads nothing
    else from that string, so CPU tensors answer with the CUDA spelling. A call with a dtype is a
    conversion and is left alone."""
    spelling = {
        torch.float32: "torch.cuda.FloatTensor",
        torch.bfloat16: "torch.cuda.BFloat16Tensor",
    }
    tensor: Any = torch.Tensor
    real_type = tensor.type

    def type_with_cuda_spelling(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and self.dtype in spelling:
            return spelling[self.dtype]
        return real_type(self, dtype, *args, **kwargs)

    tensor.type = type_with_cuda_spelling
