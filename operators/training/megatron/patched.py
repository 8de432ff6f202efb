"""Patches of Megatron-core and mbridge: their common check, and the one that GPUs need too.

Each patch is one function that documents the trigger, the symptom, and why the patch is safe.
Before it changes anything it compares the expected source with the installed one, so another
release of the library stops the start instead of being patched blindly.
"""

import hashlib
import inspect
from collections.abc import Callable

import torch
from megatron.core.transformer.moe.router import TopKRouter


class PatchError(Exception):
    """The code to be patched is not the code that the patch was written for."""


def require_source(function: Callable[..., object], sha256: str, patch: str) -> None:
    """Check that the function's source has this SHA-256 prefix.

    Raises PatchError, naming the function and the patch that must be reviewed.
    """
    function = inspect.unwrap(function)
    found = hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[: len(sha256)]
    if found != sha256:
        raise PatchError(
            f"{function.__module__}.{function.__qualname__} has source {found}, the patch {patch} "
            f"was written for {sha256}; install the pinned release (pyproject.toml), or read the "
            "new source, correct or drop the patch and put the new digest there"
        )


UPSTREAM_APPLY_EXPERT_BIAS = TopKRouter._apply_expert_bias
"""Megatron-core's own method."""


def count_tokens_without_padding() -> None:
    """Correct TopKRouter._apply_expert_bias of Megatron-core 0.16.1.

    With an expert bias (DeepSeek-V3) and a padding mask, the method computes
    `routing_map & (~padding_mask)` of shapes [tokens, experts] and [tokens]: an exception, or, with
    as many tokens as experts, silently wrong counts (it masks experts instead of tokens). Its
    siblings (auxiliary losses, z-loss) unsqueeze the mask; so does this patch. Upstream compiles
    the method; three small operations need no compiler. The patch may be applied repeatedly.
    """
    require_source(UPSTREAM_APPLY_EXPERT_BIAS, "f82dbc793f06d124", "count_tokens_without_padding")
    TopKRouter._apply_expert_bias = _apply_expert_bias


def _apply_expert_bias(
    self: TopKRouter, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None
) -> None:
    """Count tokens: routing_map [tokens, experts]; padding_mask [tokens], True for padding."""
    if self.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            if padding_mask is not None:
                routing_map = routing_map & ~padding_mask[:, None]
            self.local_tokens_per_expert += routing_map.sum(dim=0)
