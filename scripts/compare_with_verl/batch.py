"""Random batches, and what is compared of them.

Letters: B samples, L longest response, T tokens of all responses in a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Array = Any


@dataclass(frozen=True)
class Batch:
    """Samples in padded rows, [B, L]; what stands in the padding is 0."""

    groups_B: Array
    real_BL: Array
    """Bool: a token of a response, not padding."""
    mask_BL: Array
    """Bool: it counts."""
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
        """Responses in a row, [T]."""
        return values_BL[self.real_BL]

    def padded(self, values_T: Array) -> Array:
        """Responses in rows, [B, L]."""
        values_BL = np.zeros(self.real_BL.shape)
        values_BL[self.real_BL] = values_T
        return values_BL


def make_batch(seed: int) -> Batch:
    """Groups of 2 to 5 samples of 1 to 12 tokens."""
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
    """A line of the table."""

    ours: str
    theirs: str
    form: str
    """Which of several forms it is; they share a line."""
    difference: Callable[[Batch], float]


def apart(ours: Array, theirs: Array) -> float:
    """The largest difference, relative where numbers are large."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return float(np.max(np.abs(a - b) / np.maximum(1.0, np.abs(b)), initial=0.0))


def tensor(values: Array) -> torch.Tensor:
    """A float64 tensor; bools become 0 and 1."""
    return torch.from_numpy(np.asarray(values, np.float64).copy())
