"""The probability ratio of a token, and what all losses do with it. Letters: T tokens."""

from collections.abc import Mapping

from pipeline.rl.losses.types import LossTokens, Tensor

LARGEST_LOG_RATIO = 20.0
"""Bound of log(new / old) either way, against overflow, as in verl."""


def log_ratio(tokens: LossTokens) -> Tensor:
    """log(new / old) of each token, clamped."""
    difference_T = tokens.logprobs_T - tokens.old_T
    return difference_T.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)


def weighted(tokens: LossTokens, loss_T: Tensor) -> Tensor:
    """Multiply losses by the importance weights of a mismatch correction, if there is one."""
    return loss_T if tokens.weights_T is None else loss_T * tokens.weights_T


def report(tokens: LossTokens, **values_T: Tensor) -> Mapping[str, Tensor]:
    """The numbers of a loss, with the log-ratio that every loss reports."""
    return {**values_T, "log_ratio": log_ratio(tokens)}
