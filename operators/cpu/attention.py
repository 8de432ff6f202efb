"""Megatron's local core attention for packed sequences and context parallelism, used only on CPU.

With CUDA, Transformer Engine's attention supports packed sequences and context parallelism.

Dimensions: N positions in a row or in the longest sequence, M positions that this rank holds, B
sequences that are computed together, S sequences in a row, X the width of the result.
"""

import copy
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention

from operators.zigzag import Zigzag

_PADDING = 1.25
"""Maximum ratio of all tokens, including padding, to real tokens in a group of sequences that are
computed together."""


class GatheringDotProductAttention(DotProductAttention):
    """Megatron's local core attention with support for packed and distributed sequences.

    Sequences of similar lengths are computed together. They are padded on the right, so causal
    attention never reads the padding. Context-parallel ranks gather the keys and values of entire
    sequences, and each rank attends with its own queries. The gradients of keys and values are
    summed over the ranks and scattered.
    """

    def __init__(self, config: TransformerConfig, *args: object, **kwargs: object) -> None:
        # Megatron's class refuses a size above 1, but does not use this field for anything else.
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        super().__init__(alone, *args, **kwargs)
        self.context = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: object,
        packed_seq_params: PackedSeqParams | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query: [M, heads, width] in packed rows, [M, B, heads, width] in padded rows.
            key: Like `query`.
            value: Like `query`.
            attention_mask: The mask for padded rows; unused in packed rows and with CP > 1.
            *args: Passed to Megatron's class.
            packed_seq_params: The sequences of a packed row; None for padded rows.
            **kwargs: Passed to Megatron's class.

        Returns:
            [M, 1, heads * width] in packed rows, [M, B, heads * width] in padded rows.
        """
        part = Zigzag(self.context.rank(), self.context.size())
        if packed_seq_params is not None:
            ends = packed_seq_params.cu_seqlens_q.numpy()
        else:
            ends = np.array([0, len(query) * part.count], np.int32)
        held_M = part.held(ends)
        if part.count > 1:
            key, value = (self._whole(x, ends) for x in (key, value))
        if packed_seq_params is None:
            mask = attention_mask if part.count == 1 else _not_before(held_M[:, None], len(key))
            attended: torch.Tensor = super().forward(query, key, value, mask, *args, **kwargs)
            return attended
        places, results = [], []
        # A rank's queries form the same groups as the keys, because all lengths are multiples of
        # CP.
        for of_keys, of_queries in zip(_alike(ends), _alike(ends // part.count), strict=True):
            (keys_NB, _), (queries_MB, real_MB) = of_keys, of_queries
            mask = None
            if part.count > 1:
                mask = _not_before(held_M[queries_MB] - keys_NB[0].numpy(), len(keys_NB))
            inputs = (query[queries_MB], key[keys_NB], value[keys_NB], mask)
            results.append(super().forward(*inputs, *args, **kwargs)[real_MB])
            places.append(queries_MB[real_MB])
        order_M = torch.cat(places).argsort()
        return torch.cat(results)[order_M, None]

    def _whole(self, part_Mx: torch.Tensor, ends: npt.NDArray[np.int32]) -> torch.Tensor:
        """Gather the keys or values [M, ...] of all context-parallel ranks in position order."""
        count = self.context.size()
        gathered = gather_from_sequence_parallel_region(part_Mx, group=self.context)
        held = np.concatenate([Zigzag(index, count).held(ends) for index in range(count)])
        return gathered[torch.from_numpy(held.argsort())]


def _not_before(positions_MB: npt.NDArray[np.int64], keys: int) -> torch.Tensor:
    """Return a mask [B, 1, M, keys], True where a key comes after the query's position."""
    positions_BM = torch.from_numpy(positions_MB.T.copy())
    return (torch.arange(keys) > positions_BM[..., None])[:, None]


def _alike(ends: npt.NDArray[np.int32]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield groups of sequences with similar lengths, longest first.

    Each group consists of the row positions of its B sequences, [N, B], padded to the length N of
    the longest, and a mask [N, B] that marks the real positions. `ends` is `MicroBatch.ends`.
    """
    starts_S, lengths_S = ends[:-1], np.diff(ends)
    left = np.argsort(-lengths_S, kind="stable")
    while len(left):
        tokens = np.cumsum(lengths_S[left])
        padded = lengths_S[left[0]] * np.arange(1, len(left) + 1)
        count = int((padded <= _PADDING * tokens).cumprod().sum())
        group, left = left[:count], left[count:]
        offsets_N1 = np.arange(lengths_S[group[0]])[:, None]
        real_NB = offsets_N1 < lengths_S[group]
        places_NB = starts_S[group] + np.minimum(offsets_N1, lengths_S[group] - 1)
        yield torch.from_numpy(places_NB), torch.from_numpy(real_NB)
