"""Losses and the mismatch, compared with formulas that compute one number at a time."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rl.losses.kl import kl_estimate
from pipeline.rl.losses.types import LossTokens
from pipeline.rl.losses.vanilla import vanilla
from pipeline.rl.mismatch import Mismatch, mismatch, total_mismatch

reals = st.floats(-3, 3, width=32)


@dataclass(frozen=True)
class Clip:
    """Settings of the policy loss."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_ratio_c: float = 3.0


def policy_loss(new, old, advantages, clip=Clip(), weights=None):
    mask = torch.ones(len(new), dtype=torch.bool)
    tokens = LossTokens(new, old, advantages, mask, torch.zeros(len(new)), weights, samples=None)
    return vanilla(tokens, clip)


def plain_policy_loss(new, old, advantage, low, high, c):
    ratio = math.exp(min(max(new - old, -20), 20))
    limited = min(max(ratio, 1 - low), 1 + high)
    loss = max(-advantage * ratio, -advantage * limited)
    return min(loss, -advantage * c) if advantage < 0 else loss


@given(st.lists(st.tuples(reals, reals, reals), min_size=1, max_size=20))
@settings(deadline=None)
def test_the_policy_loss_equals_its_formula(rows):
    new, old, advantages = torch.tensor(rows).T
    found = policy_loss(new, old, advantages, Clip(clip_high=0.3))
    expected = [plain_policy_loss(*row, 0.2, 0.3, 3.0) for row in rows]
    assert found.loss_T.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


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


def test_the_on_policy_gradient_is_minus_the_advantage():
    """At ratio 1, the gradient with respect to the log-prob is -A, which is the policy gradient."""
    new = torch.zeros(3, requires_grad=True)
    advantages = torch.tensor([0.5, -2.0, 0.0])
    loss = policy_loss(new, torch.zeros(3), advantages)
    loss.loss_T.sum().backward()
    assert new.grad.tolist() == pytest.approx([-0.5, 2.0, 0.0])


@given(reals, reals)
@settings(deadline=None)
def test_kl_estimators_equal_their_formulas(policy, reference):
    d = reference - policy
    expected = {
        "kl": -d,
        "abs": abs(d),
        "mse": d * d / 2,
        "low_var_kl": min(max(math.exp(d) - d - 1, -10), 10),
    }
    for estimator, value in expected.items():
        found = kl_estimate(torch.tensor([policy]), torch.tensor([reference]), estimator)
        assert found.item() == pytest.approx(value, rel=1e-4, abs=1e-5)


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


def test_a_weight_scales_the_loss_of_its_token():
    """The weight also scales a clipped loss."""
    new, advantages = torch.tensor([0.0, 1.0]), torch.ones(2)
    plain = policy_loss(new, torch.zeros(2), advantages).loss_T
    found = policy_loss(new, torch.zeros(2), advantages, weights=torch.tensor([0.5, 2.0]))
    assert found.loss_T.tolist() == pytest.approx((plain * torch.tensor([0.5, 2])).tolist())


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
