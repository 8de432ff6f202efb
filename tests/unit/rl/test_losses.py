"""Edge cases of PPO's loss, of the KL and of the mismatch."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from pipeline.rl.kl import kl_estimate
from pipeline.rl.losses.formulas import vanilla
from pipeline.rl.losses.types import LossTokens
from pipeline.rl.mismatch import Mismatch, mismatch, total_mismatch


@dataclass(frozen=True)
class Clip:
    """Settings of the policy loss."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_ratio_c: float = 3.0


def policy_loss(new, old, advantages, clip=Clip()):
    mask = torch.ones(len(new), dtype=torch.bool)
    tokens = LossTokens(new, old, advantages, mask, torch.zeros(len(new)), None, samples=None)
    return vanilla(tokens, clip)


def test_the_policy_loss_reports_clipped_tokens():
    """The four tokens are clipped above, clipped below, not clipped, and bounded by the dual clip.

    Their ratios are e, 1/e, 1 and e^3, and their advantages 1, -1, 1 and -1.
    """
    new = torch.tensor([1.0, -1.0, 0.0, 3.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = policy_loss(new, torch.zeros(4), advantages)
    assert found.loss_T.tolist() == pytest.approx([-1.2, 0.8, -1.0, 3.0])
    assert found.reports["clipped"].tolist() == [True, True, False, False]
    assert found.reports["dual_clipped"].tolist() == [False, False, False, True]


def test_low_var_kl_is_clamped_as_in_verl():
    found = kl_estimate(torch.zeros(2), torch.tensor([50.0, -50.0]), "low_var_kl")
    assert found.tolist() == [10.0, 10.0]


def test_the_gradient_of_a_large_kl_is_0_and_not_nan():
    """Without a clamp, the exponential would overflow, and its gradient would be 0 times inf."""
    policy = torch.zeros(4, requires_grad=True)
    reference = torch.tensor([400.0, 100.0, -400.0, 3.0])
    kl_estimate(policy, reference, "low_var_kl").sum().backward()
    assert policy.grad.tolist() == [0.0] * 4


def test_a_ratio_equal_to_the_dual_clips_bound_is_not_clipped():
    new, advantages = torch.tensor([3.0]), torch.tensor([-1.0])
    bound = Clip(clip_ratio_c=new.exp().item())
    assert not policy_loss(new, torch.zeros(1), advantages, bound).reports["dual_clipped"].item()


def test_mismatches_add_up_over_ranks():
    """The KL is the mean of k3 over the tokens.

    A token is extreme if its two probabilities differ by a factor of more than 2.
    """
    trainer = np.array([0.0, -1.0, -2.0], np.float32)
    engine = np.array([0.0, -1.5, -1.0], np.float32)
    whole = mismatch(trainer, engine)
    expected = [0.0, math.exp(0.5) - 0.5 - 1, math.exp(-1) + 1 - 1]
    assert whole.kl == pytest.approx(sum(expected) / 3)
    assert whole.extreme_share == pytest.approx(1 / 3)
    parts = mismatch(trainer[:1], engine[:1]) + mismatch(trainer[1:], engine[1:])
    assert parts.kl == pytest.approx(whole.kl)
    assert parts.extreme == whole.extreme


def test_log_ratios_of_the_mismatch_are_clamped_to_20():
    for apart, clamped in ((19.0, 19.0), (-19.0, -19.0), (25.0, 20.0), (-25.0, -20.0)):
        found = mismatch(np.array([apart - 30], np.float32), np.array([-30], np.float32))
        assert found.kl_sum == pytest.approx(math.exp(clamped) - clamped - 1)


def test_the_mismatch_is_computed_in_double_precision():
    """In float32, the exponential of a small difference would be rounded."""
    trainer, engine = np.array([-1.0], np.float32), np.array([-1.0009766], np.float32)
    d = float(trainer[0]) - float(engine[0])
    assert mismatch(trainer, engine).kl_sum == pytest.approx(math.exp(d) - d - 1, rel=1e-6)


def test_unknown_tokens_are_left_out_of_the_mismatch_and_broken_ones_show():
    engine = np.array([-1, np.nan, -2, -3], np.float32)
    trainer = np.array([-1, -1, np.nan, -np.inf], np.float32)
    found = mismatch(trainer, engine)
    assert (found.tokens, found.extreme) == (3, 2)
    assert found.kl_sum == pytest.approx(2 * (math.exp(-20) + 19))


def test_the_total_covers_the_ranks_that_measured_a_mismatch():
    parts = [None, Mismatch(1, 0.5, 1), None, Mismatch(2, 0.25, 0), Mismatch(4, 1.0, 2)]
    assert total_mismatch(parts) == Mismatch(7, 1.75, 3)
    assert total_mismatch([None]) is None


def test_a_mismatch_without_tokens_is_null_and_not_zero():
    assert Mismatch(0, 0.0, 0).kl is None
    assert Mismatch(0, 0.0, 0).extreme_share is None
