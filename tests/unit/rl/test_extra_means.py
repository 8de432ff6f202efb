"""Means of the numbers that a reward function returns in addition to the score."""

import math

from pipeline.rl.extra_means import (
    MOST_EXTRAS,
    add_extras,
    add_to_source,
    extra_means,
    source_means,
)


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


def test_means_by_source_include_the_reward_and_cover_all_workers():
    """A sample without a reward counts only in the means of its other numbers."""
    first, second = {}, {}
    add_to_source(first, "maths", 1.0, {"length": 3})
    add_to_source(first, "code", -1.0, {})
    add_to_source(second, "maths", None, {"length": 9})
    add_to_source(second, "maths", 0.5, {})
    found = source_means([first, {}, second])
    assert found == {"code": {"reward": -1.0}, "maths": {"length": 6.0, "reward": 0.75}}
    assert list(found) == ["code", "maths"]


def test_the_number_of_sources_is_limited():
    """Samples of further sources are omitted, but those of known sources are not."""
    sums = {}
    for number in range(2 * MOST_EXTRAS):
        add_to_source(sums, f"source {number}", 1.0, {})
        add_to_source(sums, "source 0", 1.0, {})
    assert list(sums) == [f"source {number}" for number in range(MOST_EXTRAS)]
    assert sums["source 0"] == {"reward": [2 * MOST_EXTRAS + 1, 2 * MOST_EXTRAS + 1]}
