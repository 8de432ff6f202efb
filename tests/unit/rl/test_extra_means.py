"""Means of the numbers that a reward function returns in addition to the score."""

import math

from pipeline.rl.extra_means import MOST_EXTRAS, add_extras, extra_means


def test_means_cover_all_samples_and_workers():
    """Numbers and booleans are included; a sample without a number is omitted, not counted as 0."""
    first, second = {}, {}
    add_extras(first, {"right": True, "length": 3, "note": "ok", "parts": [1], "none": None})
    add_extras(first, {"right": False, "odd": math.nan})
    add_extras(second, {"length": 6.0, "right": True})
    assert extra_means([first, {}, second]) == {"length": 4.5, "right": 2 / 3}


def test_the_number_of_names_is_limited():
    sums = {}
    for number in range(2 * MOST_EXTRAS):
        add_extras(sums, {"all": 1, f"sample {number}": 1})
    assert len(sums) == MOST_EXTRAS
    assert sums["all"] == [2 * MOST_EXTRAS, 2 * MOST_EXTRAS]
