"""Which mini-batches get an optimizer step, and the scale of their auxiliary losses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from operators.training.passes import update as module
from operators.training.passes.compared import Compared
from operators.training.passes.update import auxiliary_scale, update


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
        config=SimpleNamespace(
            actor_rollout_ref=SimpleNamespace(actor=SimpleNamespace(optim=SimpleNamespace()))
        ),
    )
    mini_batches = [SimpleNamespace(epoch=0)] * len(here)
    data: Any = SimpleNamespace(step=0, layout=SimpleNamespace(mini_batches=mini_batches))
    updates = update(rank, data, Compared({}, None), None)
    assert (len(steps), updates.empty, updates.skipped) == (stepped, len(here) - stepped, 0)
    assert len(updates.sums) == len(updates.grad_norms) == stepped


@pytest.mark.parametrize(("divisor", "positions"), [(30, 40), (6, 40)])
def test_the_auxiliary_loss_is_a_mean_over_positions(divisor: int, positions: int):
    """Megatron adds each micro-batch's auxiliary loss times its positions, and divides by the
    divisor of the loss: tokens, or samples."""
    of_micro_batches = [(12, 0.5), (28, 2.0)]
    assert sum(cells for cells, _ in of_micro_batches) == positions
    scale = auxiliary_scale(divisor, positions)
    made = sum(cells * loss * scale for cells, loss in of_micro_batches) / divisor
    assert made == pytest.approx((12 * 0.5 + 28 * 2.0) / 40)
