"""The KL divergence from the reference: at each token, as a penalty in the reward, over a step.

With algorithm.use_kl_in_reward, the score of token t is s_t = r_t - coefficient * KL_t, where r_t
is the token's reward. KL_t is the KL of the policy at the step's start from the reference (policy
0), estimated at each token as in the KL loss.

Dimensions: T is the number of response tokens of this rank's samples; X is the number of these
    samples.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from pipeline.rl.estimators.types import Floats, Rollouts
from pipeline.rl.losses.types import Tensor

KlEstimator = Literal["low_var_kl", "kl", "mse", "abs"]


def kl_estimate(logprobs_T: Tensor, reference_T: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) at each sampled token from the two log-probs.

    With d = reference - policy: kl (k1) is -d, abs is |d|, mse (k2) is d^2 / 2, and low_var_kl (k3)
    is exp(d) - d - 1, with d clamped to +-20 and the result to +-10.

    Source: J. Schulman, Approximating KL divergence (2020); the clamps come from verl's kl_penalty.

    Args:
        logprobs_T: Log-probs under the policy.
        reference_T: Log-probs under the reference.
        estimator: The name of the estimator.
    """
    difference_T = reference_T - logprobs_T
    if estimator == "kl":
        return -difference_T
    if estimator == "abs":
        return difference_T.abs()
    if estimator == "mse":
        return 0.5 * difference_T.square()
    difference_T = difference_T.clamp(min=-20.0, max=20.0)
    return (difference_T.exp() - difference_T - 1.0).clamp(min=-10.0, max=10.0)


class KlControl(Protocol):
    """The settings under `algorithm.kl_ctrl`."""

    @property
    def type(self) -> Literal["fixed", "adaptive"]:
        """Whether the coefficient is fixed or adaptive."""

    @property
    def kl_coef(self) -> float:
        """The coefficient in the first step."""

    @property
    def horizon(self) -> int:
        """Number of samples over which the coefficient adapts."""

    @property
    def target_kl(self) -> float:
        """The target KL of an adaptive coefficient."""


@dataclass(frozen=True)
class StepKl:
    """The mean KL of a step. Example: StepKl(0.013, 512)."""

    mean: float
    """The mean, over samples, of each sample's mean over its tokens in the loss; 0 without
    samples."""
    samples: int
    """Number of samples with a token in the loss."""


def step_kl(rollouts: Rollouts, kl_T: Floats) -> StepKl:
    """Return the mean KL of the step's samples; every data-parallel rank must call this.

    Difference from verl: a sample without a token in the loss is excluded; in verl, such samples
    count as 0.
    """
    tokens_X = rollouts.sums_X(rollouts.mask_T)
    means_X = rollouts.sums_X(np.where(rollouts.mask_T, kl_T, 0.0)) / np.maximum(tokens_X, 1.0)
    # The values are collected per sample, so that the order of summation is the same in every
    # layout. The coefficient is therefore bit-identical in all layouts.
    means_N = rollouts.by_sample(means_X)
    counted = int(np.count_nonzero(rollouts.by_sample(tokens_X)))
    return StepKl(float(means_N.sum()) / max(counted, 1), counted)


def next_coefficient(coefficient: float, found: StepKl, control: KlControl) -> float:
    """Return the coefficient for the next step.

    A fixed coefficient stays the same. An adaptive one becomes c (1 + e n / horizon), where
    e is KL / target_kl - 1 clipped to +-0.2, and n is the number of the step's samples.

    Source: arXiv 1909.08593, section 2.2; verl's AdaptiveKLController.

    Args:
        coefficient: The coefficient c of this step.
        found: The KL of this step.
        control: The settings.
    """
    if control.type == "fixed":
        return coefficient
    error = min(max(found.mean / control.target_kl - 1.0, -0.2), 0.2)
    return coefficient * (1.0 + error * found.samples / control.horizon)
