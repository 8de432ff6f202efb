"""The loss of PPO's critic for each token, on tensors of any library with torch's methods.

Like the policy losses, the loss is returned before masking and averaging. Dimensions: T is the
number of response tokens, concatenated.
"""

from dataclasses import dataclass
from typing import Any

Tensor = Any
"""A tensor with torch's methods (clamp, maximum, minimum, square)."""


@dataclass(frozen=True)
class ValueLoss:
    """The clipped value loss, [T], and the clipped tokens."""

    loss_T: Tensor
    clipped_T: Tensor
    """Whether the clip range changed a token's loss, bool (verl's vf_clipfrac)."""


def value_loss(values_T: Tensor, old_T: Tensor, returns_T: Tensor, cliprange: float) -> ValueLoss:
    """The critic's clipped loss, max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2) / 2.

    Source: Schulman et al., openai/baselines ppo2 (2017); examined by Engstrom et al.,
    arXiv 2005.12729. The arithmetic is that of verl's compute_value_loss.

    Args:
        values_T: The values v under the weights being trained, with gradient, float32.
        old_T: The values v_old at the step's start.
        returns_T: The returns R.
        cliprange: The clip range c.
    """
    limited_T = values_T.maximum(old_T - cliprange).minimum(old_T + cliprange)
    free_T = (values_T - returns_T).square()
    clipped_T = (limited_T - returns_T).square()
    return ValueLoss(0.5 * free_T.maximum(clipped_T), clipped_T > free_T)
