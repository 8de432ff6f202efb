"""Log-probs and entropy of temperature-scaled logits whose vocabulary is split over TP ranks.

Letters: B rows, N positions, V the part of the vocabulary that this rank holds.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

Context = Any
"""torch's context, which holds whatever the two passes of a function share."""


def logprobs_and_entropy(
    logits_BNV: torch.Tensor, labels_BN: torch.Tensor, temperature: float, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """log p(label) and the entropy at each position, float32 [B, N], equal on all ranks of `group`.

    p = softmax(logits / temperature) over the whole vocabulary, of which each rank of the
    tensor-parallel `group` holds an equal contiguous part, in rank order. The logits are not
    changed. Both results have gradients.
    """
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _VocabParallel.apply
    return apply(logits_BNV, labels_BN, temperature, group)


class _VocabParallel(torch.autograd.Function):
    """Log-probs and entropy from one softmax.

    With x = logits / temperature, p = softmax(x): d log p(y) / dx_j = [j = y] - p_j, and
    dH / dx_j = -p_j (log p_j + H).
    """

    @staticmethod
    def forward(
        ctx: Context,
        logits_BNV: torch.Tensor,
        labels_BN: torch.Tensor,
        temperature: float,
        group: ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_BNV = logits_BNV.float() / temperature
        largest_BN = x_BNV.max(dim=-1).values
        dist.all_reduce(largest_BN, op=dist.ReduceOp.MAX, group=group)
        x_BNV -= largest_BN[..., None]

        part = x_BNV.shape[-1]
        local_BN = labels_BN - dist.get_rank(group) * part
        here_BN = (local_BN >= 0) & (local_BN < part)
        local_BN = local_BN.clamp(0, part - 1)
        label_BN = x_BNV.gather(-1, local_BN[..., None])[..., 0] * here_BN

        exp_BNV = x_BNV.exp()
        # One exchange for the three sums over the vocabulary.
        sums_3BN = torch.stack([exp_BNV.sum(-1), (exp_BNV * x_BNV).sum(-1), label_BN])
        dist.all_reduce(sums_3BN, group=group)
        log_z_BN = sums_3BN[0].log()
        entropy_BN = log_z_BN - sums_3BN[1] / sums_3BN[0]

        ctx.save_for_backward(x_BNV, log_z_BN, entropy_BN, local_BN, here_BN)
        ctx.temperature, ctx.dtype = temperature, logits_BNV.dtype
        return sums_3BN[2] - log_z_BN, entropy_BN

    @staticmethod
    def backward(
        ctx: Context, grad_logprobs_BN: torch.Tensor, grad_entropy_BN: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        x_BNV, log_z_BN, entropy_BN, local_BN, here_BN = ctx.saved_tensors
        logp_BNV = x_BNV - log_z_BN[..., None]
        p_BNV = logp_BNV.exp()
        grad_BNV = -grad_logprobs_BN[..., None] * p_BNV
        grad_BNV -= grad_entropy_BN[..., None] * p_BNV * (logp_BNV + entropy_BN[..., None])
        at_label_BN = (grad_logprobs_BN * here_BN)[..., None]
        grad_BNV.scatter_add_(-1, local_BN[..., None], at_label_BN)
        return (grad_BNV / ctx.temperature).to(ctx.dtype), None, None, None
