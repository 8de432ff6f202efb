"""Means, over a step's samples, of the numbers that a reward function returns with the score."""

import sys
from collections.abc import Iterable, Mapping
from typing import Any

ExtraSums = dict[str, list[float]]
"""The sum and the count of the numbers that were returned under each name."""

SourceSums = dict[str, ExtraSums]
"""The sums of the samples' rewards and extras, keyed by data source."""

REWARD = "reward"
"""The name of the reward among a data source's numbers, as in verl."""

MOST_EXTRAS = 100
"""Maximum number of names, and maximum number of data sources. The limits are needed because every
sample could add new ones."""


def add_extras(sums: ExtraSums, extras: Mapping[str, Any]) -> None:
    """Add a sample's finite numbers to the sums; other values are ignored, and true counts as 1."""
    for name, value in extras.items():
        if not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
            continue  # an integer may be larger than any float
        if name in sums or len(sums) < MOST_EXTRAS:
            total, count = sums.get(name, (0.0, 0))
            sums[name] = [total + value, count + 1]


def extra_means(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean under each name from the sums of several workers, sorted by name."""
    totals: ExtraSums = {}
    for part in parts:
        for name, (total, count) in part.items():
            there = totals.setdefault(name, [0.0, 0])
            totals[name] = [there[0] + total, there[1] + count]
    return {name: totals[name][0] / totals[name][1] for name in sorted(totals)}


def add_to_source(
    sums: SourceSums, source: str, reward: float | None, extras: Mapping[str, Any]
) -> None:
    """Add a sample's reward and extras to the sums of its data source.

    Args:
        sums: The sums to change in place, keyed by data source.
        source: The sample's data source.
        reward: The sample's reward; None if the sample has no reward.
        extras: Further values that the reward function returned.
    """
    if source in sums or len(sums) < MOST_EXTRAS:
        add_extras(sums.setdefault(source, {}), {**extras, REWARD: reward})


def source_means(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Return the mean for each data source and name, sorted, from the sums of several workers."""
    of_sources: dict[str, list[Mapping[str, Any]]] = {}
    for part in parts:
        for source, sums in part.items():
            of_sources.setdefault(source, []).append(sums)
    return {source: extra_means(of_sources[source]) for source in sorted(of_sources)}
