"""Estimates of the KL divergence between two policies, from log-probs of sampled tokens."""

from typing import Literal

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
