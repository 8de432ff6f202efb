"""The ranks that report rows, tokens and samples, so that sums count everything exactly once."""

from itertools import product
from typing import Any
from unittest.mock import MagicMock

import pytest

from operators.training.batches.micro_batch import Slice
from operators.training.megatron.parallel import RankPosition
from operators.zigzag import Zigzag


def positions(sequence_parallel: bool) -> list[RankPosition]:
    """Return the positions of the ranks that form one data-parallel rank: TP2 x CP2 x PP2."""
    group: Any = MagicMock()
    return [
        RankPosition(
            dp_rank=0,
            data_parallel=1,
            stage=stage,
            last_stage=stage == 1,
            tensor_rank=tensor_rank,
            tensor_group=group,
            sequence=Slice(tensor_rank, 2) if sequence_parallel else Slice(),
            context=Zigzag(context_rank, 2),
            context_group=group,
            samples_group=group,
            data_group=group,
        )
        for stage, context_rank, tensor_rank in product(range(2), range(2), range(2))
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_everything_is_reported_once(sequence_parallel: bool):
    """One rank reports samples, and one rank for each part of the sequences reports tokens."""
    ranks = positions(sequence_parallel)
    samples = [rank for rank in ranks if rank.speaks_for_samples]
    tokens = [rank for rank in ranks if rank.speaks_for_tokens]
    rows = [rank for rank in ranks if rank.speaks_for_rows and rank.stage == 0]
    assert len(samples) == 1
    assert [rank.context.index for rank in tokens] == [0, 1]
    assert all(rank.last_stage for rank in tokens)
    parts = {(rank.context, rank.sequence) for rank in rows}
    assert len(parts) == len(rows) == (4 if sequence_parallel else 2)
