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


@dataclass(frozen=True)
class PolicyLoss:
    """The loss of each token, before any is masked or averaged."""

    loss_T: Tensor
    reports: Mapping[str, Tensor]
    """Numbers or bools [T] whose means over tokens are metrics, by name."""


LossFunction = Callable[[LossTokens, LossSettings], PolicyLoss]
