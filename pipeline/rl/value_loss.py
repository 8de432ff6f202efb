"""The loss of PPO's critic per token, on tensors of any library whose tensors have torch's methods.

Like the policy losses it is neither masked nor averaged. Letters: T response tokens in a row.
"""

from dataclasses import dataclass
from typing import Any

Tensor = Any
"""A tensor with torch's methods (clamp, maximum, minimum, square)."""


@dataclass(frozen=True)
class ValueLoss:
    """The clipped value loss, [T], and where it was clipped."""

    loss_T: Tensor
    clipped_T: Tensor
    """Bool: the clip range changed the loss (verl's vf_clipfrac)."""


def value_loss(values_T: Tensor, old_T: Tensor, returns_T: Tensor, cliprange: float) -> ValueLoss:
    """L = max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2, float32.

    v are the values that the loss changes, v_old those of the step's beginning, R the returns.

    Source: Schulman et al., openai/baselines ppo2 (2017); examined by Engstrom et al.,
    arXiv 2005.12729; the arithmetic of verl's compute_value_loss.
    """
    limited_T = values_T.maximum(old_T - cliprange).minimum(old_T + cliprange)
    free_T = (values_T - returns_T).square()
    clipped_T = (limited_T - returns_T).square()
    return ValueLoss(0.5 * free_T.maximum(clipped_T), clipped_T > free_T)
