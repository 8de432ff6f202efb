"""The KL penalty in the reward, and its coefficient in each step."""

import json
import math
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rl.kl import StepKl, next_coefficient, step_kl
from tests.unit.rl.estimators.steps import estimated, in_parts, steps


@dataclass(frozen=True)
class Control:
    type: Literal["fixed", "adaptive"] = "adaptive"
    kl_coef: float = 0.1
    horizon: int = 1000
    target_kl: float = 0.5


@pytest.mark.parametrize(
    ("kl", "samples", "expected"),
    [
        (0.5, 100, 0.1),  # on target
        (0.55, 100, 0.1 * (1 + 0.1 * 100 / 1000)),
        (5.0, 100, 0.1 * (1 + 0.2 * 100 / 1000)),  # clipped
        (0.0, 100, 0.1 * (1 - 0.2 * 100 / 1000)),
        (-3.0, 100, 0.1 * (1 - 0.2 * 100 / 1000)),  # k1 may be negative
        (5.0, 0, 0.1),
    ],
)
def test_an_adaptive_coefficient_follows_the_kl(kl, samples, expected):
    assert next_coefficient(0.1, StepKl(kl, samples), Control()) == pytest.approx(expected)


def test_a_fixed_coefficient_does_not_change():
    assert next_coefficient(0.1, StepKl(5.0, 100), Control("fixed")) == 0.1


@given(st.lists(st.floats(0, 2), min_size=1, max_size=20))
def test_a_coefficient_that_was_stored_as_json_continues_bit_identically(kls):
    calm = stored = 0.1
    for kl in kls:
        calm = next_coefficient(calm, StepKl(kl, 77), Control())
        found = next_coefficient(stored, StepKl(kl, 77), Control())
        stored = json.loads(json.dumps(found))
    assert stored == calm


@given(whole=steps(), data=st.data())
@settings(deadline=None, max_examples=30)
def test_the_mean_is_over_samples_and_equal_in_every_layout(whole, data):
    """The mean is bit-identical, so the next coefficient does not depend on the layout."""
    count = len(whole.lengths_X)
    kl_T = np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=len(whole.mask_T))
    found = step_kl(whole, kl_T)
    means = []
    for sample in range(count):
        of_sample = kl_T[(whole.sample_T == sample) & whole.mask_T]
        if len(of_sample):
            means.append(sum(of_sample) / len(of_sample))
    expected = sum(means) / len(means) if means else 0.0
    assert math.isclose(found.mean, expected, rel_tol=1e-9, abs_tol=1e-12)
    assert found.samples == len(means)

    half = data.draw(st.integers(0, count))
    rows = [np.arange(half), np.arange(half, count)]
    marked = replace(whole, scores_T=kl_T)  # in_parts then splits the KL like the tokens
    parts = estimated(in_parts(marked, rows), lambda part: step_kl(part, part.scores_T))
    assert parts == [found, found]
