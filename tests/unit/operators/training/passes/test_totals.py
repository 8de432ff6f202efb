"""Totals of a mini-batch, computed before its micro-batches are laid out."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from operators.training.batches.layout import LayoutRules, make_layout
from operators.training.batches.micro_batch import Contents, Slice, lay_out
from operators.training.batches.zigzag import Zigzag
from operators.training.passes.compared import Compared
from operators.training.passes.totals import totals_of
from tests.unit.operators.training.batches.test_layout import make_sample


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("context", [1, 2, 3])
def test_totals_agree_with_the_laid_out_micro_batches(
    monkeypatch: pytest.MonkeyPatch, context: int, packed: bool
):
    """There are two data-parallel ranks. Each consists of context-parallel ranks, tensor-parallel
    ranks and two pipeline stages. Tokens and samples that a correction has rejected are not
    counted."""
    samples = {f"{i}/0/0": make_sample(f"{i}/0/0", 1 + i, 3 * i) for i in range(9)}
    ids, rng = dict(enumerate(samples)), np.random.default_rng(0)
    mask = {id: rng.random(3 * i) < 0.7 for i, id in ids.items()} | {
        "7/0/0": np.zeros(21, bool),
        "8/0/0": np.arange(24) == 5,
    }
    rules = LayoutRules(0, 99, 2, 1, 2, context_parallel=context, packed=packed)
    lengths = np.array([len(s.tokens_S) - 1 for s in samples.values()])
    (mini_batch,) = make_layout(0, np.arange(9), lengths, rules).mini_batches
    data: Any = SimpleNamespace(samples=samples, ids=ids)
    sums = np.zeros(3)

    def add(numbers: torch.Tensor) -> None:
        assert numbers.dtype == torch.float64  # exact sums of millions of positions
        sums[:] += numbers.numpy()

    monkeypatch.setattr(torch.distributed, "all_reduce", add)
    counted = 0
    for dp_rank, index, tensor_rank, stage in np.ndindex(2, context, 2, 2):
        part = Zigzag(index, context)
        last = stage == 1
        position = SimpleNamespace(
            dp_rank=dp_rank, speaks_for_samples=last and not tensor_rank and not index
        )
        rank: Any = SimpleNamespace(chunks=[torch.nn.Linear(1, 1)], position=position)
        totals_of(rank, data, mini_batch, Compared({}, None, mask=mask if last else {}))
        if tensor_rank == stage == 0:
            for where in mini_batch.shares[dp_rank]:
                response = lay_out(
                    where, ids, Contents(samples, frozenset(), sequence=Slice(), context=part)
                ).response
                counted += int(response.joined(mask).sum())
    assert sums.tolist() == [counted, sum(m.any() for m in mask.values()), lengths.sum()]
    assert counted > 0
