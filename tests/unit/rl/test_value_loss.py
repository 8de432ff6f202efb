"""The clipped value loss, compared with numbers computed by hand and with a plain loop."""

import torch

from pipeline.rl.losses.formulas import value_loss


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
