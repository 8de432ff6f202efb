"""The channel for a rank's metrics: name, value, and how the values of all ranks combine.

    a rank: {"mismatch/kl": mean(0.8, 512), "timing_s/ref": Measured(max, 1.5), ...}
                                                                   all ranks ─► reduced ─► metrics

A rank leaves out what another rank measures. A metric per layer has one name for each layer
(`pipeline.metrics.metric.by_layer`), so ranks may have different layers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.metrics.metric import Metrics


class Measured(NamedTuple):
    """A rank's value of a metric. Example: Measured(max, 1.5)."""

    reduce: Callable[[Sequence[Any]], float | None]
    """Combines the values of one or more ranks, in rank order. The function must be picklable."""
    value: Any
    """The value; None if this rank has none."""


Measurements = Mapping[str, Measured]
"""A rank's values, keyed by metric."""


def mean(total: float, count: int) -> Measured:
    """Return this rank's part of a mean over all ranks' items, or of a share of them.

    Args:
        total: The sum over this rank's items, or the number of those that the share covers.
        count: Number of this rank's items; without items on any rank, the metric is None.
    """
    return Measured(_mean, (total, count))


def _mean(parts: Sequence[tuple[float, int]]) -> float | None:
    count = sum(count for _, count in parts)
    return sum(total for total, _ in parts) / count if count else None


def spread(name: str, values_X: npt.NDArray[Any]) -> Measurements:
    """Return this rank's parts of the metrics `name`/mean, /max and /min.

    Args:
        name: The beginning of the metrics' names.
        values_X: The values of this rank's items, float32 or float64; may be empty.
    """
    some = len(values_X) > 0
    return {
        f"{name}/mean": mean(float(values_X.sum(dtype=np.float64)), len(values_X)),
        f"{name}/max": Measured(max, float(values_X.max()) if some else None),
        f"{name}/min": Measured(min, float(values_X.min()) if some else None),
    }


def reduced(of_ranks: Sequence[Measurements]) -> Metrics:
    """Return the metrics over all ranks; None for those of which no rank has a value."""
    found: Metrics = {}
    for name in dict.fromkeys(name for measured in of_ranks for name in measured):
        parts = [measured[name] for measured in of_ranks if name in measured]
        values = [part.value for part in parts if part.value is not None]
        found[name] = parts[0].reduce(values) if values else None
    return found
