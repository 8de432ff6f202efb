"""The KL penalty in the reward over steps: its mean, and the coefficient that weighs it.

algorithm.use_kl_in_reward: s_t = r_t - coefficient * KL_t, with the KL of the policy at the step's
start from the reference (policy 0), estimated at each token as the KL loss is (`losses.kl`).

Letters: T response tokens of this rank's samples, X its samples.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from pipeline.rl.estimators.types import Floats, Rollouts


class KlControl(Protocol):
    """The settings under `algorithm.kl_ctrl`."""

    @property
    def type(self) -> Literal["fixed", "adaptive"]:
        """How the coefficient changes."""

    @property
    def kl_coef(self) -> float:
        """The coefficient of the first step."""

    @property
    def horizon(self) -> int:
        """Samples over which the coefficient reacts."""

    @property
    def target_kl(self) -> float:
        """The KL that an adaptive coefficient aims at."""


@dataclass(frozen=True)
class StepKl:
    """The mean KL of a step. Example: StepKl(0.013, 512)."""

    mean: float
    """Over samples, of the mean over a sample's tokens that count; 0 without samples."""
    samples: int
    """Samples with a token that counts."""


def step_kl(rollouts: Rollouts, kl_T: Floats) -> StepKl:
    """The mean KL of the step's samples. All ranks call.

    Difference to verl: a sample without a token that counts is left out; there it counts as 0.
    """
    tokens_X = rollouts.sums_X(rollouts.mask_T)
    means_X = rollouts.sums_X(np.where(rollouts.mask_T, kl_T, 0.0)) / np.maximum(tokens_X, 1.0)
    # By sample, so that the sum has one order in every layout and the coefficient the same bits.
    means_N = rollouts.by_sample(means_X)
    counted = int(np.count_nonzero(rollouts.by_sample(tokens_X)))
    return StepKl(float(means_N.sum()) / max(counted, 1), counted)


def next_coefficient(coefficient: float, found: StepKl, control: KlControl) -> float:
    """The coefficient of the next step.

    fixed: the same. adaptive: c (1 + e n / horizon), with e = KL / target_kl - 1 clipped to +-0.2
    and n the step's samples.

    Source: arXiv 1909.08593, section 2.2; verl's AdaptiveKLController.
    """
    if control.type == "fixed":
        return coefficient
    error = min(max(found.mean / control.target_kl - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * found.samples / control.horizon)
