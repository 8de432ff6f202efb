"""Losses and mismatch against the formulas written out for one number at a time."""

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
from pipeline.rl.mismatch import Mismatch, mismatch

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
def test_policy_loss_is_its_formula(rows):
    new, old, advantages = torch.tensor(rows).T
    found = policy_loss(new, old, advantages, Clip(clip_high=0.3))
    expected = [plain_policy_loss(*row, 0.2, 0.3, 3.0) for row in rows]
    assert found.loss_T.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_policy_loss_counts_where_it_was_clipped():
    """Ratios e, 1/e, 1, e^3 with advantages 1, -1, 1, -1: clipped above, clipped below, free, and
    held by the dual clip."""
    new = torch.tensor([1.0, -1.0, 0.0, 3.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = policy_loss(new, torch.zeros(4), advantages)
    assert found.loss_T.tolist() == pytest.approx([-1.2, 0.8, -1.0, 3.0])
    assert found.reports["clipped"].tolist() == [True, True, False, False]
    assert found.reports["dual_clipped"].tolist() == [False, False, False, True]


def test_on_policy_gradient_is_the_advantage():
    """At ratio 1 the gradient of the loss by the log-prob is -A: the policy gradient."""
    new = torch.zeros(3, requires_grad=True)
    advantages = torch.tensor([0.5, -2.0, 0.0])
    loss = policy_loss(new, torch.zeros(3), advantages)
    loss.loss_T.sum().backward()
    assert new.grad.tolist() == pytest.approx([-0.5, 2.0, 0.0])


@given(reals, reals)
@settings(deadline=None)
def test_kl_estimators_are_their_formulas(policy, reference):
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


def test_low_var_kl_is_clamped_like_verl():
    found = kl_estimate(torch.zeros(2), torch.tensor([50.0, -50.0]), "low_var_kl")
    assert found.tolist() == [10.0, 10.0]


def test_a_weight_scales_the_loss_of_its_token():
    """Also where the loss is clipped."""
    new, advantages = torch.tensor([0.0, 1.0]), torch.ones(2)
    plain = policy_loss(new, torch.zeros(2), advantages).loss_T
    found = policy_loss(new, torch.zeros(2), advantages, weights=torch.tensor([0.5, 2.0]))
    assert found.loss_T.tolist() == pytest.approx((plain * torch.tensor([0.5, 2])).tolist())


def test_mismatch_adds_over_ranks():
    """k3 by token, and a token is extreme if the probabilities differ by more than 2 either way."""
    trainer = np.array([0.0, -1.0, -2.0], np.float32)
    engine = np.array([0.0, -1.5, -1.0], np.float32)
    whole = mismatch(trainer, engine)
    expected = [0.0, math.exp(0.5) - 0.5 - 1, math.exp(-1) + 1 - 1]
    assert whole.kl == pytest.approx(sum(expected) / 3)
    assert whole.extreme_share == pytest.approx(1 / 3)
    parts = mismatch(trainer[:1], engine[:1]) + mismatch(trainer[1:], engine[1:])
    assert parts.kl == pytest.approx(whole.kl)
    assert parts.extreme == whole.extreme


def test_nothing_measured_is_none_and_not_zero():
    assert Mismatch(0, 0.0, 0).kl is None
    assert Mismatch(0, 0.0, 0).extreme_share is None
