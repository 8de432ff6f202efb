"""Means of what a reward function returns beside the score, over the samples of a step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

ExtraSums = dict[str, list[float]]
"""By name: the sum of its numbers, and how many there were."""

SourceSums = dict[str, ExtraSums]
"""By data source: the sums of its samples' rewards and extras."""

REWARD = "reward"
"""The name of the reward among a data source's numbers, as in verl."""

MOST_EXTRAS = 100
"""Names, and data sources, that are added up: there could be a new one in every sample."""


def add_extras(sums: ExtraSums, extras: Mapping[str, Any]) -> None:
    """Add a sample's numbers, true as 1; texts, lists and groups have no mean."""
    for name, value in extras.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if name in sums or len(sums) < MOST_EXTRAS:
            total, count = sums.get(name, (0.0, 0))
            sums[name] = [total + value, count + 1]


def extra_means(parts: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Means by name, over the sums of several workers; the order is that of the names."""
    totals: ExtraSums = {}
    for part in parts:
        for name, (total, count) in part.items():
            there = totals.setdefault(name, [0.0, 0])
            totals[name] = [there[0] + total, there[1] + count]
    return {name: totals[name][0] / totals[name][1] for name in sorted(totals)}


def add_to_source(
    sums: SourceSums, source: str, reward: float | None, extras: Mapping[str, Any]
) -> None:
    """Add a sample's reward, if it has one, and its extras to those of its data source."""
    if source in sums or len(sums) < MOST_EXTRAS:
        add_extras(sums.setdefault(source, {}), {**extras, REWARD: reward})


def source_means(parts: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, float]]:
    """Means by data source and name, over the sums of several workers, in their order."""
    of_sources: dict[str, list[Mapping[str, Any]]] = {}
    for part in parts:
        for source, sums in part.items():
            of_sources.setdefault(source, []).append(sums)
    return {source: extra_means(of_sources[source]) for source in sorted(of_sources)}
