"""The inputs and results of policy losses, on tensors with torch's methods.

This module does not import a tensor library, so that `pipeline` stays light. Dimensions: T is the
number of a micro-batch's response tokens on this rank, concatenated; S is the number of the
micro-batch's samples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Tensor = Any
"""A tensor with torch's methods (exp, clamp, maximum, minimum, where, square, abs, detach)."""


class Samples(Protocol):
    """The samples to which tokens belong.

    A sample may also have tokens on other ranks. All ranks that share a sample must call the same
    methods. Gradients pass through these methods.
    """

    @property
    def tokens_S(self) -> Tensor:
        """Number of each sample's tokens that are included in the loss, float32."""

    @property
    def counts_samples(self) -> bool:
        """Whether this rank counts the samples; only one of the ranks that share them does."""

    def sum(self, values_T: Tensor) -> Tensor:
        """Return each sample's sum over the tokens included in the loss: [S]."""

    def mean(self, values_T: Tensor) -> Tensor:
        """Return each sample's mean over the tokens included in the loss; 0 without any: [S]."""

    def spread(self, values_S: Tensor) -> Tensor:
        """Repeat each sample's value for its tokens: [T]."""


@dataclass(frozen=True)
class LossTokens:
    """The tokens of a micro-batch; each tensor is float32 [T] unless stated otherwise."""

    logprobs_T: Tensor
    """Log-probs under the weights being trained, with gradient."""
    old_T: Tensor
    """Log-probs at the step's start: the trainer's, or the engine's with bypass_mode."""
    advantages_T: Tensor
    mask_T: Tensor
    """Whether a token is included in the loss, bool."""
    entropy_T: Tensor
    weights_T: Tensor | None
    """Importance weights of a mismatch correction, without gradient; None if the correction has no
    weights."""
    samples: Samples
    chosen_T: Tensor | None = None
    """Whether Clip-Cov drops or KL-Cov penalises a token, bool; None with other losses."""


class CovarianceSettings(Protocol):
    """The settings under `policy_loss` that Clip-Cov and KL-Cov read."""

    @property
    def clip_cov_ratio(self) -> float:
        """The share of tokens that Clip-Cov draws."""

    @property
    def clip_cov_lb(self) -> float:
        """Lower bound of the covariance of a token that may be drawn."""

    @property
    def clip_cov_ub(self) -> float:
        """Upper bound of the covariance of a token that may be drawn."""

    @property
    def kl_cov_ratio(self) -> float:
        """The share of tokens that KL-Cov penalises."""

    @property
    def ppo_kl_coef(self) -> float:
        """Weight of KL-Cov's penalty."""


class LossSettings(Protocol):
    """The settings under `actor_rollout_ref.actor` that losses read."""

    @property
    def clip_low(self) -> float:
        """The lower clip range: ratios below 1 - clip_low are clipped."""

    @property
    def clip_high(self) -> float:
        """The upper clip range: ratios above 1 + clip_high are clipped."""

    @property
    def clip_ratio_c(self) -> float:
        """The bound on the ratio in the dual clip, for negative advantages."""

    @property
    def tau_pos(self) -> float:
        """Steepness of SAPO's gate for positive advantages."""

    @property
    def tau_neg(self) -> float:
        """Steepness of SAPO's gate for advantages that are not positive."""

    @property
    def policy_loss(self) -> CovarianceSettings:
        """The settings of `policy_loss`."""


@dataclass(frozen=True)
class PolicyLoss:
    """The losses of all tokens, before masking and averaging."""

    loss_T: Tensor
    reports: Mapping[str, Tensor]
    """Tensors of numbers or bools [T], keyed by name; their means over tokens become metrics."""


LossFunction = Callable[[LossTokens, LossSettings], PolicyLoss]
