"""Patches for Megatron-core and mbridge: their common check, and the one patch also needed on GPUs.

Each patch is one function, whose docstring gives the trigger, the symptom, and the reason why the
patch is safe. A patch first compares the installed source with the expected one. With a
different release of the library, the process fails when it starts, instead of patching unknown
code.
"""

import hashlib
import inspect
from collections.abc import Callable

import torch
from megatron.core.transformer.moe.router import TopKRouter


class PatchError(Exception):
    """The installed code differs from the code for which the patch was written."""


def require_source(function: Callable[..., object], sha256: str, patch: str) -> None:
    """Check that a function's source is the one for which a patch was written.

    Args:
        function: The function to be patched.
        sha256: The expected SHA-256 of its source, or a prefix.
        patch: Name of the patch, for the error message.

    Raises:
        PatchError: The source differs; the message names the function and the patch that must be
            reviewed.
    """
    function = inspect.unwrap(function)
    found = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[: len(sha256)]
    if found != sha256:
        raise PatchError(
            f"{function.__module__}.{function.__qualname__} has source {found}, but the patch "
            f"{patch} was written for {sha256}; install the pinned release (pyproject.toml), or "
            "review the new source, correct or remove the patch, and enter the new digest"
        )


UPSTREAM_APPLY_EXPERT_BIAS = TopKRouter._apply_expert_bias
"""Megatron-core's own method."""


def count_tokens_without_padding() -> None:
    """Correct TopKRouter._apply_expert_bias in Megatron-core 0.16.1.

    With an expert bias (DeepSeek-V3) and a padding mask, the method computes
    `routing_map & (~padding_mask)` with shapes [tokens, experts] and [tokens]. If the numbers of
    tokens and experts differ, the operation raises an exception. If they are equal, the method
    silently masks experts instead of tokens, and the counts are incorrect. The methods for
    auxiliary losses and z-loss unsqueeze the mask, and so does this patch. Upstream compiles the
    method; the patched method is not compiled, because it has only three small operations. The
    patch may be applied repeatedly.
    """
    require_source(UPSTREAM_APPLY_EXPERT_BIAS, "f82dbc793f06d124", "count_tokens_without_padding")
    TopKRouter._apply_expert_bias = _apply_expert_bias


def _apply_expert_bias(
    self: TopKRouter, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> None:
    """Count each expert's tokens, excluding padding.

    `routing_map` is bool [tokens, experts]; `padding_mask` is bool [tokens], True for padding.
    """
    if self.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += routing_map.sum(dim=0)
