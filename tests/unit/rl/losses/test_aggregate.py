"""The aggregation of a sample whose tokens are on several ranks."""

from dataclasses import replace
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from pipeline.rl.losses.aggregate import AggregationMode, Totals, aggregation
from tests.unit.rl.losses.batches import OneRank

MODES = get_args(AggregationMode)
MASK_T = torch.tensor([True, True, False, True, False])
SAMPLES = OneRank(torch.tensor([0, 0, 0, 1, 2]), MASK_T, number=3)
"""Three samples with 2, 1 and 0 tokens in the loss."""


@pytest.mark.parametrize("mode", MODES)
def test_only_one_of_the_ranks_that_share_samples_counts_them(mode: AggregationMode):
    """Each rank counts its own tokens in any case."""
    divisors = []
    for counts in (True, False):
        tokens = SimpleNamespace(mask_T=MASK_T, samples=replace(SAMPLES, counts_samples=counts))
        divisors.append(aggregation(mode, tokens, 4.0).divisor)
    assert [one.tolist() for one in divisors] == ([3, 3] if mode == "token-mean" else [2, 0])
    assert {one.dtype for one in divisors} == {torch.int32}


@pytest.mark.parametrize("mode", MODES)
def test_the_divisor_of_a_mini_batch_is_the_sum_of_its_micro_batches(mode: AggregationMode):
    tokens = SimpleNamespace(mask_T=MASK_T, samples=SAMPLES)
    of_micro_batch = aggregation(mode, tokens, 4.0).divisor
    assert Totals(tokens=3, samples=2).divisor(mode) == of_micro_batch.item()
