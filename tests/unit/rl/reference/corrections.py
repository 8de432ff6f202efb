"""Mismatch corrections from their definitions; r is p_trainer / p_engine for a sampled token.

Sources: F. Yao et al., Your efficient RL framework secretly brings you off-policy RL training
(2025); J. Liu et al., When speed kills stability (2025); IcePop, arXiv 2510.18855; J. Schulman,
Approximating KL divergence (2020).
"""

import math

import numpy as np

from tests.unit.rl.reference.batch import Batch, Sample


def _logs(sample: Sample) -> list[float]:
    """Return log r for the tokens in the loss."""
    return [float(sample.old_L[t] - sample.engine_L[t]) for t in sample.counted]


def weights(
    batch: Batch, level: str, lower: float | None, upper: float, normalized: bool
) -> list[list[float]]:
    """Return the weights of the tokens in the loss.

    Without `lower`, weights are clipped to `upper`. With `lower`, weights outside the bounds are 0.
    Normalized weights are divided by their mean. If each sequence has one weight, the mean is over
    sequences.
    """
    found: list[list[float]] = []
    for sample in batch:
        logs = _logs(sample)
        if level == "sequence":
            logs = [math.fsum(logs)] * len(logs)
        elif level == "geometric":
            logs = [math.fsum(logs) / len(logs)] * len(logs) if logs else []
        of_sample = [math.exp(min(max(log, -20.0), 20.0)) for log in logs]
        if lower is None:
            of_sample = [min(weight, upper) for weight in of_sample]
        else:
            of_sample = [weight if lower <= weight <= upper else 0.0 for weight in of_sample]
        found.append(of_sample)
    if not normalized:
        return found
    each = [one for one in found if one]
    several = [w for one in each for w in one] if level == "token" else [one[0] for one in each]
    mean = math.fsum(several) / len(several)
    return [[weight / mean for weight in one] for one in found] if mean else found


def kept(batch: Batch, form: str, lower: float | None, upper: float) -> list[list[bool]]:
    """Return, for each token in the loss, whether the rejection keeps it.

    For k1, the bounds apply to 1 / r. For the other forms, they apply to the statistic.
    """
    of_what, _, statistic = form.rpartition("_")
    low, high = (math.log(lower or 1 / upper), math.log(upper)) if statistic == "k1" else (0, upper)
    found = []
    for sample in batch:
        logs = [min(max(log, -20.0), 20.0) for log in _logs(sample)]
        values = [
            {"k1": -log, "k2": log * log / 2, "k3": math.exp(log) - 1 - log}[statistic]
            for log in logs
        ]
        if of_what != "token" and values:
            whole = {"seq_sum": math.fsum, "seq_mean": np.mean, "seq_max": max}[of_what](values)
            values = [whole] * len(values)
        found.append([low <= value <= high for value in values])
    return found


def vetoed(batch: Batch, least: float) -> list[bool]:
    """Return, for each sample, whether the ratio of any token in the loss is below `least`."""
    return [any(math.exp(log) < least for log in _logs(sample)) for sample in batch]
