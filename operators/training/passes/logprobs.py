"""Computes log-probs and entropy from final hidden states, one chunk of tokens at a time.

The logits of an entire micro-batch are never all in memory at the same time. The backward pass
recomputes the logits of each chunk. The vocabulary may be split over tensor-parallel ranks.

Dimensions: T tokens, C tokens in a chunk, B tokens in a block of a chunk, H the model's width, V
the size of the part of the vocabulary that this rank holds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

CHUNK_TOKENS = 1024
"""Number of tokens in a chunk: large enough for an efficient matrix product."""

_BLOCKS = 8
"""Number of blocks into which a chunk is divided for exponentiation, so that temporary tensors are
no larger than one block."""

Context = Any
"""torch's context object, which passes values from the forward to the backward function."""


def logprobs_and_entropy(
    hidden_TH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_T: torch.Tensor,
    temperature: float,
    group: ProcessGroup,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log p(label) and the entropy of each token.

    p = softmax(hidden @ weight.T / temperature) over the full vocabulary. Matrix products are
    computed in the dtype of the weight, and everything else in float32. In addition to the inputs
    and their gradients, the function needs at most 1.5 times the memory of one chunk's float32
    logits.

    Args:
        hidden_TH: Final hidden states.
        weight_VH: This rank's part of the output layer. The ranks of `group` hold contiguous parts
            of the vocabulary, which have equal sizes and are in rank order.
        labels_T: Token ids.
        temperature: Divisor of the logits.
        group: The tensor-parallel group, whose ranks must call this together.
        entropy_gradient: Whether the entropy has a gradient; the log-probs always have one.

    Returns:
        Log-probs and entropy (nats), float32 [T], equal on all ranks of `group`.
    """
    apply: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _Chunked.apply
    logprobs_T, entropy_T = apply(
        hidden_TH.to(weight_VH.dtype),
        weight_VH,
        labels_T,
        _How(temperature, group, entropy_gradient),
    )
    return logprobs_T, entropy_T if entropy_gradient else entropy_T.detach()


@dataclass(frozen=True)
class _How:
    temperature: float
    group: ProcessGroup
    entropy_gradient: bool


class _Chunked(torch.autograd.Function):
    """Log-probs and entropy with gradients, chunk by chunk.

    With x = logits / temperature and p = softmax(x), the gradients are
    d log p(y) / dx_j = [j = y] - p_j and dH / dx_j = -p_j (log p_j + H), where H is the entropy.
    """

    @staticmethod
    def forward(
        ctx: Context,
        hidden_TH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_T: torch.Tensor,
        how: _How,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        part = len(weight_VH)
        local_T = labels_T - dist.get_rank(how.group) * part
        here_T = (local_T >= 0) & (local_T < part)
        local_T = local_T.clamp(0, part - 1)
        logprobs_T, log_z_T, entropy_T = (
            torch.empty(len(labels_T), device=hidden_TH.device) for _ in range(3)
        )
        for chunk in _chunks(len(labels_T)):
            x_CV = _logits(hidden_TH[chunk], weight_VH, how.temperature)
            largest_C = x_CV.max(dim=-1).values
            dist.all_reduce(largest_C, op=dist.ReduceOp.MAX, group=how.group)
            x_CV -= largest_C[:, None]
            label_C = x_CV.gather(-1, local_T[chunk, None])[:, 0] * here_T[chunk]
            # One collective computes all three sums over the vocabulary.
            sums_3C = torch.stack([*_sums(x_CV), label_C])
            dist.all_reduce(sums_3C, group=how.group)
            log_z_C = sums_3C[0].log()
            logprobs_T[chunk] = sums_3C[2] - log_z_C
            entropy_T[chunk] = log_z_C - sums_3C[1] / sums_3C[0]
            log_z_T[chunk] = log_z_C + largest_C
            del x_CV  # before the next chunk's logits are computed
        ctx.save_for_backward(hidden_TH, weight_VH, local_T, here_T, log_z_T, entropy_T)
        ctx.how = how
        return logprobs_T, entropy_T

    @staticmethod
    def backward(
        ctx: Context, grad_logprobs_T: torch.Tensor, grad_entropy_T: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_TH, weight_VH, local_T, here_T, log_z_T, entropy_T = ctx.saved_tensors
        grad_hidden_TH = torch.empty_like(hidden_TH)
        grad_weight_VH = torch.zeros(weight_VH.shape, device=weight_VH.device)
        for chunk in _chunks(len(local_T)):
            logp_CV = _logits(hidden_TH[chunk], weight_VH, ctx.how.temperature)
            logp_CV -= log_z_T[chunk, None]
            of_token_C = grad_logprobs_T[chunk]
            if ctx.how.entropy_gradient:
                _to_gradients(logp_CV, of_token_C, grad_entropy_T[chunk], entropy_T[chunk])
            else:
                logp_CV.exp_().mul_(-of_token_C[:, None])
            at_label_C = of_token_C * here_T[chunk]
            logp_CV.scatter_add_(-1, local_T[chunk, None], at_label_C[:, None])
            logp_CV /= ctx.how.temperature
            grad_CV = logp_CV.to(weight_VH.dtype)
            del logp_CV
            grad_hidden_TH[chunk] = grad_CV @ weight_VH
            grad_weight_VH += grad_CV.T @ hidden_TH[chunk]
            del grad_CV  # before the next chunk's logits are computed
        return grad_hidden_TH, grad_weight_VH.to(weight_VH.dtype), None, None


def _to_gradients(
    logp_CV: torch.Tensor,
    grad_logprobs_C: torch.Tensor,
    grad_entropy_C: torch.Tensor,
    entropy_C: torch.Tensor,
) -> None:
    """Replace log p in place with the part of x's gradient that does not depend on the label.

    This part is -p (grad_logprobs + grad_entropy (log p + H)).
    """
    for block_BV, rows in _blocks(logp_CV):
        p_BV = block_BV.exp()
        block_BV += entropy_C[rows, None]
        block_BV *= grad_entropy_C[rows, None]
        block_BV += grad_logprobs_C[rows, None]
        block_BV *= p_BV
        block_BV.neg_()


def _chunks(tokens: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK_TOKENS) for start in range(0, tokens, CHUNK_TOKENS))


def _blocks(x_CV: torch.Tensor) -> Iterator[tuple[torch.Tensor, slice]]:
    """Cut a chunk into blocks of rows; yield a view of each block, and its rows."""
    size = -(-len(x_CV) // _BLOCKS)
    return (
        (x_CV[start : start + size], slice(start, start + size))
        for start in range(0, len(x_CV), size)
    )


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return a chunk's logits divided by the temperature, float32."""
    logits_CV: torch.Tensor = hidden_CH @ weight_VH.T
    return logits_CV.float().div_(temperature)


def _sums(x_CV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums of exp(x) and of exp(x) x over this rank's vocabulary; x is at most 0."""
    sums = []
    for block_BV, _ in _blocks(x_CV):
        exp_BV = block_BV.exp()
        sum_B = exp_BV.sum(-1)
        sums.append((sum_B, exp_BV.mul_(block_BV).sum(-1)))
    exp_C, expected_C = (torch.cat(parts) for parts in zip(*sums, strict=True))
    return exp_C, expected_C
