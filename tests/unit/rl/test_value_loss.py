"""The clipped value loss, compared with numbers computed by hand and with a plain loop."""

import numpy as np
import torch

from pipeline.rl.value_loss import value_loss


def test_the_loss_equals_numbers_computed_by_hand():
    """The returns are 2, the old values 0, and the clip range is 0.5.

    A value of 1 is clipped to 0.5, and the clipped loss is used because it is larger. A value of
    -1 is clipped towards the returns, so the unclipped loss is used.
    """
    values = torch.tensor([0.25, 1.0, -1.0], requires_grad=True)
    old, returns = torch.zeros(3), torch.full((3,), 2.0)
    found = value_loss(values, old, returns, 0.5)
    assert found.loss_T.tolist() == [1.75**2 / 2, 1.5**2 / 2, 3.0**2 / 2]
    assert found.clipped_T.tolist() == [False, True, False]
    found.loss_T.sum().backward()
    assert values.grad.tolist() == [-1.75, 0.0, -3.0]


def test_the_loss_equals_a_loop_on_random_tokens():
    rng = np.random.default_rng(0)
    values, old, returns = rng.normal(size=(3, 500))
    found = value_loss(*map(torch.from_numpy, (values, old, returns)), 0.3)
    for i, (v, o, r) in enumerate(zip(values, old, returns, strict=True)):
        limited = min(max(v, o - 0.3), o + 0.3)
        assert abs(found.loss_T[i] - max((v - r) ** 2, (limited - r) ** 2) / 2) < 1e-12
    assert 0.1 < found.clipped_T.float().mean() < 0.9
