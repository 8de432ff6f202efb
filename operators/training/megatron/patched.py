"""The one patch of Megatron-core that is also needed on GPUs."""

import torch
from megatron.core.transformer.moe.router import TopKRouter

from operators.patches import require_source

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
