"""Moments of a set of numbers equal numpy's, however the set is split."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.rl.moments import EMPTY, Moments, moments

NAMES = ("mean", "deviation", "variance", "unbiased", "effective", "largest", "smallest")
numbers = st.lists(st.floats(-100, 100).map(lambda x: round(x, 3)), min_size=2, max_size=20)


def by_numpy(values: np.ndarray) -> list[float]:
    square = np.square(values).sum()
    effective = values.sum() ** 2 / (len(values) * square) if square else 0.0
    spread = [values.std(), values.var(ddof=1), values.std(ddof=1)]
    return [values.mean(), *spread, effective, values.max(), values.min()]


@given(numbers, st.integers(0, 20))
def test_moments_of_two_parts_equal_those_of_all_numbers(values, at):
    found = moments(values[:at]) + moments(values[at:])
    expected = by_numpy(np.array(values))
    assert [getattr(found, name) for name in NAMES] == pytest.approx(expected, abs=1e-4, rel=1e-6)


def test_one_number_has_no_variance_and_deviates_by_0():
    found = moments([3.0])
    assert [getattr(found, name) for name in NAMES] == [3.0, 0.0, None, 0.0, 1.0, 3.0, 3.0]


def test_an_empty_set_has_no_properties():
    for empty in (moments([]), EMPTY, EMPTY + moments(np.zeros(0, bool))):
        assert [getattr(empty, name) for name in NAMES] == [None] * len(NAMES)
    assert moments([]) + moments([2.0]) == moments([2.0])


def test_rounding_errors_do_not_make_a_spread_negative():
    """The square of the mean is larger than the mean of the squares."""
    found = Moments(3, 3.0, 3.0 - 1e-12, 1.0, 1.0)
    assert (found.deviation, found.variance, found.unbiased) == (0.0, 0.0, 0.0)


def test_bools_count_as_numbers():
    assert moments([True, False, True, True]).mean == 0.75
    assert moments([0.0, 0.0]).effective == 0.0
