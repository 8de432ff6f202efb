"""Which mini-batches get an optimizer step."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from operators.training.passes import update as module
from operators.training.passes.update import Compared, update


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
