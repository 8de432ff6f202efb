"""Random batches, and rows of the comparison.

Dimensions: B is the number of samples, L the length of the longest response, and T the total number
of tokens in all responses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = Any


@dataclass(frozen=True)
class Batch:
    """Samples in rows that are padded with 0, [B, L]."""

    groups_B: Array
    real_BL: Array
    """Whether each position holds a response token, not padding (bool)."""
    mask_BL: Array
    """Whether each token is included in the loss, not masked (bool)."""
    scores_BL: Array
    baseline_B: Array
    new_BL: Array
    old_BL: Array
    engine_BL: Array
    values_BL: Array
    returns_BL: Array
    advantages_BL: Array
    weights_BL: Array

    def flat(self, values_BL: Array) -> Array:
        """Return the values of all responses, concatenated: [T]."""
        return values_BL[self.real_BL]

    def padded(self, values_T: Array) -> Array:
        """Return the values of all responses, in padded rows: [B, L]."""
        values_BL = np.zeros(self.real_BL.shape)
        values_BL[self.real_BL] = values_T
        return values_BL


def make_batch(seed: int) -> Batch:
    """Return four groups of 2 to 5 samples with 1 to 12 tokens."""
    random = np.random.default_rng(seed)
    groups = np.repeat(np.arange(4), random.integers(2, 6, 4))
    lengths = random.integers(1, 13, len(groups))
    real = np.arange(12) < lengths[:, None]
    mask = real & (random.random(real.shape) < 0.8)
    rows = np.arange(len(groups))
    mask[rows, lengths - 1] = True
    new = -random.exponential(2.0, real.shape)
    scores = np.where(mask, 0.1 * random.normal(size=real.shape), 0.0)
    scores[rows, lengths - 1] += random.choice([0.0, 1.0, 0.5], len(groups))

    def some(scale: float = 1.0, shift: float = 0.0) -> Array:
        return random.normal(shift, scale, real.shape)

    numbers = {
        "scores_BL": scores,
        "new_BL": new,
        "old_BL": np.minimum(new + some(0.3), 0.0),
        "engine_BL": np.minimum(new + some(0.3), 0.0),
        "values_BL": some(),
        "returns_BL": some(),
        "advantages_BL": some(),
        "weights_BL": np.abs(some(0.5, 1.0)),
    }
    padded = {name: np.where(real, values, 0.0) for name, values in numbers.items()}
    baseline = random.normal(size=4)[groups]
    return Batch(groups, real, mask, baseline_B=baseline, **padded)


@dataclass(frozen=True)
class Row:
    """One comparison. Several comparisons of the same function share a line of the table."""

    ours: str
    theirs: str
    form: str
    """Name of the variant that is compared, if several variants share a line."""
    difference: Callable[[Batch], float]


def apart(ours: Array, theirs: Array) -> float:
    """Return the largest difference.

    If the absolute value of verl's number exceeds 1, the difference is relative to it.
    """
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b)), initial=0.0))


def tensor(values: Array) -> torch.Tensor:
    """Return a float64 tensor; bools become 0 and 1."""
    return torch.from_numpy(np.asarray(values, np.float64).copy())
