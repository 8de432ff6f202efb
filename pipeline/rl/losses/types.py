"""What a policy loss reads and returns, on tensors with torch's methods.

Nothing here imports a tensor library, so that `pipeline` stays light. Letters: T response tokens of
a micro-batch that this rank holds, in a row; S samples of the micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Tensor = Any
"""A tensor with torch's methods (exp, clamp, maximum, minimum, where, square, abs, detach)."""


class Samples(Protocol):
    """Which tokens belong together. A sample's other tokens may be on other ranks, which call the
    same methods; gradients flow through."""

    @property
    def tokens_S(self) -> Tensor:
        """Tokens of each sample that count, float32."""

    @property
    def counts_samples(self) -> bool:
        """Whether this rank is the one, of those that share the samples, that counts them."""

    def sum(self, values_T: Tensor) -> Tensor:
        """Sum over the tokens of each sample that count: [S]."""

    def mean(self, values_T: Tensor) -> Tensor:
        """Mean over the tokens of each sample that count, 0 without any: [S]."""

    def spread(self, values_S: Tensor) -> Tensor:
        """Repeat a value of each sample for its tokens: [T]."""


@dataclass(frozen=True)
class LossTokens:
    """The tokens of a micro-batch, float32 [T] each."""

    logprobs_T: Tensor
    """Log-probs that the loss changes."""
    old_T: Tensor
    """The trainer's log-probs at the step's start."""
    advantages_T: Tensor
    mask_T: Tensor
    """Bool: whether a token counts."""
    entropy_T: Tensor
    weights_T: Tensor | None
    """Importance weights of a mismatch correction, without gradient; None: none is configured."""
    samples: Samples
    chosen_T: Tensor | None = None
    """Bool: tokens that Clip-Cov and KL-Cov hold back; None with other losses."""


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
        """Weight of the penalty."""


class LossSettings(Protocol):
    """The settings under `actor_rollout_ref.actor` that losses read."""

    @property
    def clip_low(self) -> float:
        """Ratios below 1 - clip_low are clipped."""

    @property
    def clip_high(self) -> float:
        """Ratios above 1 + clip_high are clipped."""

    @property
    def clip_ratio_c(self) -> float:
        """Dual clip: bound of the loss for negative advantages."""

    @property
    def tau_pos(self) -> float:
        """SAPO: steepness of the gate for positive advantages."""

    @property
    def tau_neg(self) -> float:
        """SAPO: steepness of the gate for other advantages."""

    @property
    def policy_loss(self) -> CovarianceSettings:
        """The settings of `policy_loss`."""


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of each token, before any is masked or averaged."""

    loss_T: Tensor
    reports: Mapping[str, Tensor]
    """Numbers or bools [T] whose means over tokens are metrics, by name."""


LossFunction = Callable[[LossTokens, LossSettings], PolicyLoss]
