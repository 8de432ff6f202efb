"""Sums over the tokens of each sample, even if context-parallel ranks share the sample."""

from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from operators.training.batches.micro_batch import ResponseTokens
from operators.training.batches.upload import uploaded
from operators.training.rank import Rank


class SamplesOfBatch:
    """The samples of a micro-batch on a rank (see the protocol `Samples`).

    Dimensions: S samples, T response tokens on this rank.
    """

    def __init__(self, rank: Rank, response: ResponseTokens, mask_T: torch.Tensor) -> None:
        """Prepare the sums over the samples of a micro-batch.

        Args:
            rank: This training rank.
            response: The response tokens of the micro-batch.
            mask_T: Whether each token is included in the sums, bool.
        """
        self._context = rank.position.context
        self._group = rank.position.context_group
        self._mask_T = mask_T
        self._sample_T = uploaded(response.sample_T, mask_T.device)
        self._count = len(response.ids)
        self.counts_samples = self._context.index == 0

    @cached_property
    def tokens_S(self) -> torch.Tensor:
        """Number of included tokens in each sample, float32."""
        return self.sum(torch.ones_like(self._mask_T, dtype=torch.float32))

    def sum(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the sum over each sample's included tokens, [S]."""
        counted_T = torch.where(self._mask_T, values_T, 0)
        sums_S = counted_T.new_zeros(self._count).index_add(0, self._sample_T, counted_T)
        if self._context.count == 1:
            return sums_S
        summed: torch.Tensor = _Sum.apply(sums_S, self._group)  # type: ignore[no-untyped-call]
        return summed

    def mean(self, values_T: torch.Tensor) -> torch.Tensor:
        """Return the mean over each sample's included tokens, [S]; 0 if there are none."""
        return self.sum(values_T) / self.tokens_S.clamp(min=1.0)

    def spread(self, values_S: torch.Tensor) -> torch.Tensor:
        """Repeat each sample's value for each of its tokens, [T]."""
        return values_S.index_select(0, self._sample_T)


class _Sum(torch.autograd.Function):
    """A sum over ranks. Gradients are also summed over ranks, because each rank uses the sum."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradients[0].clone()
        dist.all_reduce(summed, group=ctx.group)
        return summed, None
