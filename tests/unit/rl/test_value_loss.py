"""The clipped value loss, against numbers worked out by hand and a plain loop."""

import numpy as np
import torch

from pipeline.rl.value_loss import value_loss


def test_by_hand():
    """Returns of 2, values that began at 0, a range of 0.5: a value of 1 is clipped to 0.5, whose
    distance counts, as it is larger; a value of -1 is clipped towards the returns, which does not.
    """
    values = torch.tensor([0.25, 1.0, -1.0], requires_grad=True)
    old, returns = torch.zeros(3), torch.full((3,), 2.0)
    found = value_loss(values, old, returns, 0.5)
    assert found.loss_T.tolist() == [1.75**2 / 2, 1.5**2 / 2, 3.0**2 / 2]
    assert found.clipped_T.tolist() == [False, True, False]
    found.loss_T.sum().backward()
    assert values.grad.tolist() == [-1.75, 0.0, -3.0]


def test_on_random_tokens():
    rng = np.random.default_rng(0)
    values, old, returns = rng.normal(size=(3, 500))
    found = value_loss(*map(torch.from_numpy, (values, old, returns)), 0.3)
    for i, (v, o, r) in enumerate(zip(values, old, returns, strict=True)):
        limited = min(max(v, o - 0.3), o + 0.3)
        assert abs(found.loss_T[i] - max((v - r) ** 2, (limited - r) ** 2) / 2) < 1e-12
    assert 0.1 < found.clipped_T.float().mean() < 0.9
