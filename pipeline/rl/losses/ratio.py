"""The probability ratio of a token, and helpers that all losses share.

Dimensions: T is the number of tokens.
"""

from collections.abc import Mapping

from pipeline.rl.losses.types import LossTokens, Tensor

LARGEST_LOG_RATIO = 20.0
"""Bound on |log(new / old)|, to prevent overflow, as in verl."""


def log_ratio(tokens: LossTokens) -> Tensor:
    """Return log(new / old) of each token, clamped."""
    difference_T = tokens.logprobs_T - tokens.old_T
    return difference_T.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)


def weighted(tokens: LossTokens, loss_T: Tensor) -> Tensor:
    """Multiply losses by the importance weights of a mismatch correction, if one is configured."""
    return loss_T if tokens.weights_T is None else loss_T * tokens.weights_T


def report(tokens: LossTokens, **values_T: Tensor) -> Mapping[str, Tensor]:
    """Return a loss's own reports together with the log-ratio, which every loss reports."""
    return {**values_T, "log_ratio": log_ratio(tokens)}
