"""Which mini-batches get an optimizer step, and the scale of their auxiliary losses."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from operators.training.batches.layout import LayoutRules, make_layout
from operators.training.batches.micro_batch import Contents, Slice, lay_out
from operators.training.batches.zigzag import Zigzag
from operators.training.passes import update as module
from operators.training.passes.compared import Compared
from operators.training.passes.update import auxiliary_scale, update
from tests.unit.operators.training.batches.test_layout import make_sample


@pytest.mark.parametrize(
    ("here", "elsewhere", "stepped"),
    [([3, 0], [0, 0], 1), ([0, 0], [0, 0], 0), ([0, 2], [5, 0], 2)],
)
def test_a_mini_batch_without_tokens_on_any_rank_gets_no_step(
    monkeypatch: pytest.MonkeyPatch, here: list[int], elsewhere: list[int], stepped: int
):
    """Tokens by mini-batch, on this rank and on another."""
    turns, others, steps = iter(here), iter(elsewhere), []

    def gradients(*_: Any) -> tuple[list[dict[str, torch.Tensor]], dict[int, Any]]:
        return [{"tokens": torch.tensor(next(turns)), "policy": torch.tensor(1.0)}], {}

    def largest(tokens: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        tokens.fill_(max(int(tokens), next(others)))

    def checked_step(_: Any) -> tuple[bool, float]:
        steps.append(1)
        return True, 1.5

    monkeypatch.setattr(module, "gradients", gradients)
    monkeypatch.setattr(module, "checked_step", checked_step)
    monkeypatch.setattr(torch.distributed, "all_reduce", largest)
    rank: Any = SimpleNamespace(
        chunks=[torch.nn.Linear(1, 1)],
        optimizer=None,
        rates=SimpleNamespace(set=lambda step: 0.1),
        skipped=SimpleNamespace(in_a_row=0),
    )
    mini_batches = [SimpleNamespace(epoch=0)] * len(here)
    data: Any = SimpleNamespace(step=0, layout=SimpleNamespace(mini_batches=mini_batches))
    updates = update(rank, data, Compared({}, None), None)
    assert (len(steps), updates.empty, updates.skipped) == (stepped, len(here) - stepped, 0)
    assert len(updates.sums) == len(updates.grad_norms) == stepped


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_auxiliary_scale_counts_what_is_laid_out(
    monkeypatch: pytest.MonkeyPatch, context: int, packed: bool
):
    """Response tokens by all tokens, over all ranks, known before a micro-batch is laid out.
    One sample was cut off and one is not trained on: their response tokens do not count."""
    samples = {f"{i}/0/0": make_sample(f"{i}/0/0", 1 + i, 3 * i) for i in range(9)}
    samples["5/0/0"] = replace(samples["5/0/0"], finish_reason="length")
    untrained = frozenset({"7/0/0"})
    ids, ignored = dict(enumerate(samples)), frozenset({"abort", "length"})
    rules = LayoutRules(0, 99, 2, 1, 2, context_parallel=context, packed=packed)
    lengths = np.array([len(s.tokens_S) - 1 for s in samples.values()])
    (mini_batch,) = make_layout(0, np.arange(9), lengths, rules).mini_batches
    data: Any = SimpleNamespace(samples=samples, untrained=untrained, ids=ids)
    algorithm = SimpleNamespace(mask_truncated_samples=True)
    sums = np.zeros(2)
    counted = 0

    def add(numbers: torch.Tensor, group: Any) -> None:
        sums[:] += numbers.numpy()

    monkeypatch.setattr(torch.distributed, "all_reduce", add)
    for dp_rank, index in np.ndindex(2, context):
        part = Zigzag(index, context)
        rank: Any = SimpleNamespace(
            chunks=[torch.nn.Linear(1, 1)],
            config=SimpleNamespace(algorithm=algorithm),
            position=SimpleNamespace(dp_rank=dp_rank, context=part, data_group=None),
        )
        auxiliary_scale(rank, data, mini_batch)
        contents = Contents(
            samples, untrained, sequence=Slice(), context=part, without_loss=ignored
        )
        for where in mini_batch.shares[dp_rank]:
            counted += int(lay_out(where, ids, contents).response.loss_mask_T.sum())
    assert counted > 0
    assert sums[0] == counted
    assert sums[1] == pytest.approx(lengths.sum())
