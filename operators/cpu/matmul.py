"""Products of bfloat16 matrices, on processors with and without instructions for bfloat16.

Without these instructions, torch multiplies bfloat16 matrices one value at a time, or emulates the
instructions. The same product in float32, rounded once, is 2 to 14 times faster. Both accumulate
in float32, so they differ only in the last bit of a few values in 100,000. With the instructions,
torch's own products are the fastest, and they stay unchanged.
"""

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial

import torch

_PRODUCTS: tuple[Callable[..., torch.Tensor], ...] = (
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
)
"""The operators that compute all products: of linear layers, experts and attention, forward and
backward."""
_LESS_THAN_BF16 = frozenset(
    {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
)
"""Values of ONEDNN_MAX_CPU_ISA with which oneDNN, which multiplies for torch, does not use
instructions for bfloat16."""
_KEPT_SHAPES = "2048"
"""The number of shapes for which oneDNN keeps its code; each takes about 0.2 MB."""
_library: torch.library.Library | None = None


def prepare() -> None:
    """Select the fastest products for this processor; call this before the first product."""
    global _library
    # For each new shape, oneDNN generates code, which takes longer than a product of small
    # matrices. An expert has a different number of tokens in each micro-batch, so there are more
    # shapes than oneDNN keeps by default (1,024).
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _KEPT_SHAPES)
    if _library is None and not multiplies_bfloat16(torch.cpu.get_capabilities(), os.environ):
        _library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        multiply_in_float32(_library)


def multiplies_bfloat16(processor: Mapping[str, object], environment: Mapping[str, str]) -> bool:
    """Return whether torch multiplies bfloat16 matrices with instructions made for them.

    `processor` is the result of torch.cpu.get_capabilities.
    """
    limit = environment.get("ONEDNN_MAX_CPU_ISA", "").upper()
    has = bool(processor.get("avx512_bf16") or processor.get("amx_bf16"))
    return has and limit not in _LESS_THAN_BF16


def multiply_in_float32(library: torch.library.Library) -> None:
    """Register products that compute in float32 and round to bfloat16 once.

    The products of other types stay the same. The registration ends with the library object.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # of the override
        for product in _PRODUCTS:
            kernel = partial(_product, product)
            library.impl(product.__name__, kernel, "CPU")  # type: ignore[no-untyped-call]


def _product(
    product: Callable[..., torch.Tensor], *tensors: torch.Tensor, **scales: float
) -> torch.Tensor:
    """Compute a product; the last two of `tensors` are the matrices, a first of three is added.

    torch's own kernel is still reachable, because the operator that receives `out` is another one.
    """
    left, right = tensors[-2:]
    shape = (*left.shape[:-1], right.shape[-1])
    if right.dtype != torch.bfloat16:
        return product(*tensors, out=right.new_empty(shape), **scales)
    wide = (tensor.float() for tensor in tensors)
    return product(*wide, out=right.new_empty(shape, dtype=torch.float32), **scales).bfloat16()
