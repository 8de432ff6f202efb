"""Context parallelism: the positions of a row that each rank holds.

Every sequence is padded to a multiple of 2 * CP positions and cut into 2 * CP chunks. Rank r holds
chunks r and 2 * CP - 1 - r, so that causal attention is equally expensive on all ranks.
Megatron-core (get_batch_on_this_cp_rank, _get_thd_freqs_on_this_cp_rank) and Transformer Engine
(thd_get_partitioned_indices) cut sequences in the same way.

Dimensions: B rows, N positions in a row, M positions in a row that a rank holds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


def sequence_multiple(context_parallel: int, sequence_slices: int) -> int:
    """Return the multiple to which each sequence of a packed row is padded.

    With context parallelism, sequence parallelism cuts each chunk again, into `sequence_slices`
    slices.
    """
    return 2 * context_parallel * sequence_slices if context_parallel > 1 else 1


@dataclass(frozen=True)
class Zigzag:
    """One context-parallel rank's part of each sequence. Example: Zigzag(index=1, count=2)."""

    index: int = 0
    count: int = 1

    def held(self, ends: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the positions [M] of a row that this rank holds, ascending.

        `ends` contains 0 and then the end of each sequence, all multiples of 2 * CP.
        """
        if self.count == 1:
            return np.arange(ends[-1], dtype=np.int64)
        parts = [np.empty(0, np.int64)]
        for start, end in pairwise(ends.tolist()):
            size = (end - start) // (2 * self.count)
            for chunk in (self.index, 2 * self.count - 1 - self.index):
                parts.append(start + chunk * size + np.arange(size))
        return np.concatenate(parts)

    def held_of(self, positions: int, sequence_slices: int) -> npt.NDArray[np.int64]:
        """Return the positions that this rank holds of a sample in a packed row, ascending."""
        multiple = sequence_multiple(self.count, sequence_slices)
        held = self.held(np.array([0, -(-positions // multiple) * multiple], np.int32))
        return held[held < positions]

    def cut(self, array_BNx: npt.NDArray[Any], held_M: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return this rank's part [B, M, ...] of an array of full rows.

        `held_M` is the result of `held`.
        """
        return array_BNx if self.count == 1 else array_BNx[:, held_M]

    def joined(
        self, parts_BMx: Sequence[npt.NDArray[Any]], ends: npt.NDArray[np.int32]
    ) -> npt.NDArray[Any]:
        """Join the parts of all ranks into full rows [B, N, ...]: the reverse of `cut`.

        `parts_BMx` are in rank order; `ends` is the argument of `held`.
        """
        if self.count == 1:
            return parts_BMx[0]
        B, _, *rest = parts_BMx[0].shape
        whole_BNx = np.empty((B, int(ends[-1]), *rest), parts_BMx[0].dtype)
        for index, part_BMx in enumerate(parts_BMx):
            whole_BNx[:, Zigzag(index, self.count).held(ends)] = part_BMx
        return whole_BNx


ALL = Zigzag()
"""A rank's part without context parallelism: all positions."""
