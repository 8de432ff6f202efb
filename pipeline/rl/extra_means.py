"""Means of what a reward function returns beside the score, over the samples of a step."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

ExtraSums = dict[str, list[float]]
"""By name: the sum of its numbers, and how many there were."""

MOST_EXTRAS = 100
"""Names that are added up: a function could make new names of every sample."""


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
