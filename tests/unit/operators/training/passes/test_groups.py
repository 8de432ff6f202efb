"""The groups of ranks that collectives use."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from operators.training.passes.advantages import data_parallel_ranks
from operators.training.passes.logprob_pass import _route_groups


def test_totals_use_the_group_of_the_ranks_that_share_the_step(monkeypatch: pytest.MonkeyPatch):
    used: list[Any] = []
    monkeypatch.setattr(dist, "all_reduce", lambda values, group=None: used.append(group))
    group = object()
    position = SimpleNamespace(samples_group=group)
    rank: Any = SimpleNamespace(position=position, chunks=[torch.nn.Linear(1, 1)])
    assert data_parallel_ranks(rank).total(np.ones(2)).tolist() == [1, 1]
    assert used == [group]


@pytest.mark.parametrize("counts", [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_routes_are_joined_over_ranks_that_share_sequences(counts: tuple[int, int]):
    of_sequence, of_context = (SimpleNamespace(count=count) for count in counts)
    position = SimpleNamespace(
        sequence=of_sequence, context=of_context, tensor_group="tensor", context_group="context"
    )
    rank: Any = SimpleNamespace(position=position)
    groups = _route_groups(rank)
    assert groups.sequence == ("tensor" if counts[0] > 1 else None)
    assert groups.context == ("context" if counts[1] > 1 else None)
