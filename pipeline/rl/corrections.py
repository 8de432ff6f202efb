"""Corrections of the mismatch between the trainer's distribution and the one sampled from.

They are made once per step, before the updates. Letters: T response tokens, sample after sample.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class CorrectionSettings(Protocol):
    """The settings under `algorithm.rollout_correction` that corrections read."""

    @property
    def rollout_is(self) -> str | None:
        """Kind of importance weight."""

    @property
    def rollout_is_threshold(self) -> float:
        """Upper bound of the weight."""


@dataclass(frozen=True)
class Correction:
    """The result of the corrections."""

    weights_T: Floats | None
    """Importance weights of the policy loss; None: none is configured."""
    mask_T: npt.NDArray[np.bool_]
    """Whether a token counts."""


def correct(
    old_T: Floats,
    engine_T: Floats,
    mask_T: npt.NDArray[np.bool_],
    settings: CorrectionSettings,
) -> Correction:
    """Weigh tokens by the probability ratio of trainer and engine.

    `old_T` are the trainer's log-probs at the step's start, `engine_T` those of the distribution
    that was sampled from, `mask_T` the tokens that count. What the others hold has no effect.
    """
    if settings.rollout_is is None:
        return Correction(None, mask_T)
    weights_T = token_weights(old_T, engine_T, settings.rollout_is_threshold)
    return Correction(np.where(mask_T, weights_T, 0.0), mask_T)


def token_weights(old_T: Floats, engine_T: Floats, threshold: float) -> Floats:
    """Truncated importance sampling: min(exp(old - engine), threshold).

    The log-ratio is clamped to +-20 against overflow, as in verl.

    Source: F. Yao et al., Your efficient RL framework secretly brings you off-policy RL training
    (2025); verl's algorithm.rollout_correction with rollout_is=token.
    """
    weights_T: Floats = np.minimum(np.exp(np.clip(old_T - engine_T, -20, 20)), threshold)
    return weights_T
