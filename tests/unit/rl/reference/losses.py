"""Policy losses from the papers, and the aggregation of token losses into one number.

A loss function takes a sample and returns the losses of its tokens that are included in the loss,
and their derivatives. The derivatives are a matrix with a row for each loss and a column for each
log-prob under the current weights. Importance weights multiply the losses. `total` aggregates a
batch.

Dimensions: C is the number of tokens of a sample that are included in the loss.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.unit.rl.reference.batch import Batch, Sample

Losses = tuple[Any, Any]
"""The losses [C] and their derivatives [C, C]."""
NOTHING: Losses = (np.zeros(0), np.zeros((0, 0)))
"""The result for a sample without a token in the loss."""


def _tokens(sample: Sample) -> tuple[Any, Any, Any, Any]:
    """Return new and old log-probs, advantages and weights, [C] each."""
    kept = sample.mask_L
    return (
        sample.new_L[kept],
        sample.old_L[kept],
        sample.advantages_L[kept],
        sample.weights_L[kept],
    )


def _each(sample: Sample, token: Any) -> Losses:
    """Apply a loss to each token separately.

    `token(new, old, A)` returns the token's loss and its derivative.
    """
    new_C, old_C, advantages_C, weights_C = _tokens(sample)
    found = [token(*row) for row in zip(new_C, old_C, advantages_C, strict=True)]
    losses_C = np.array([loss for loss, _ in found])
    slopes_C = np.array([slope for _, slope in found])
    return losses_C * weights_C, np.diag(slopes_C * weights_C)


def vanilla(sample: Sample, settings: SimpleNamespace) -> Losses:
    """PPO (arXiv 1707.06347), equation 7.

    The bounds come from DAPO (arXiv 2503.14476), equation 8, and the dual clip comes from
    arXiv 1912.09729, equation 5.
    """

    def token(new: float, old: float, advantage: float) -> tuple[float, float]:
        ratio = np.exp(new - old)
        clipped = min(max(ratio, 1 - settings.clip_low), 1 + settings.clip_high)
        objective = min(ratio * advantage, clipped * advantage)
        free = ratio * advantage <= clipped * advantage
        if advantage < 0 and objective < settings.clip_ratio_c * advantage:
            objective, free = settings.clip_ratio_c * advantage, False
        return -objective, -advantage * ratio * free

    return _each(sample, token)


def gpg(sample: Sample, settings: SimpleNamespace) -> Losses:
    """GPG (arXiv 2504.02546), equation 5: -A log p."""
    return _each(sample, lambda new, old, advantage: (-advantage * new, -advantage))


def cispo(sample: Sample, settings: SimpleNamespace) -> Losses:
    """CISPO (MiniMax-M1, arXiv 2506.13585), equations 4 and 5: -sg[clip(r)] A log p."""

    def token(new: float, old: float, advantage: float) -> tuple[float, float]:
        ratio = np.clip(np.exp(new - old), 1 - settings.clip_low, 1 + settings.clip_high)
        return -ratio * advantage * new, -ratio * advantage

    return _each(sample, token)


def sapo(sample: Sample, settings: SimpleNamespace) -> Losses:
    """SAPO (arXiv 2511.20347), equations 5 to 7.

    The gate is (4 / tau) p with p = sigmoid(tau (r - 1)), and its derivative is 4 p (1 - p) r.
    """

    def token(new: float, old: float, advantage: float) -> tuple[float, float]:
        tau = settings.tau_pos if advantage > 0 else settings.tau_neg
        ratio = np.exp(new - old)
        share = 1 / (1 + np.exp(-tau * (ratio - 1)))
        return -advantage * share * 4 / tau, -advantage * 4 * share * (1 - share) * ratio

    return _each(sample, token)


def dppo_tv(sample: Sample, settings: SimpleNamespace) -> Losses:
    """DPPO (arXiv 2602.04879), section 4, with the difference between old and new probabilities.

    An update must not move a token further out of the trust region.
    """

    def token(new: float, old: float, advantage: float) -> tuple[float, float]:
        moved = np.exp(new) - np.exp(old)
        kept = moved <= settings.clip_high if advantage > 0 else moved >= -settings.clip_low
        ratio = min(np.exp(new - old), settings.clip_ratio_c) * kept
        return -ratio * advantage * new, -ratio * advantage

    return _each(sample, token)


def dppo_kl(sample: Sample, settings: SimpleNamespace) -> Losses:
    """DPPO (arXiv 2602.04879), section 4, with a KL divergence over two outcomes.

    The outcomes are the sampled token and any other token.
    """

    def token(new: float, old: float, advantage: float) -> tuple[float, float]:
        p, q = np.exp(old), np.exp(new)
        kl = p * np.log(p / q) + (1 - p) * np.log((1 - p + 1e-8) / (1 - q + 1e-8))
        near = kl <= (settings.clip_high if advantage > 0 else settings.clip_low)
        kept = near or (q <= p if advantage > 0 else q >= p)
        ratio = min(q / p, settings.clip_ratio_c) * kept
        return -ratio * advantage * new, -ratio * advantage

    return _each(sample, token)


def gspo(sample: Sample, settings: SimpleNamespace) -> Losses:
    """GSPO-token (arXiv 2507.18071), equations 7, 13 and 14.

    The ratio s of the sequence is the geometric mean of its tokens' ratios. Each token has the
    derivative of its own log-prob.
    """
    new_C, old_C, advantages_C, weights_C = _tokens(sample)
    s = np.exp(np.mean(new_C - old_C))
    clipped = min(max(s, 1 - settings.clip_low), 1 + settings.clip_high)
    losses_C = -np.minimum(s * advantages_C, clipped * advantages_C)
    free_C = s * advantages_C <= clipped * advantages_C
    return losses_C * weights_C, np.diag(-advantages_C * s * free_C * weights_C)


def geo_mean(sample: Sample, settings: SimpleNamespace) -> Losses:
    """GMPO (arXiv 2507.20673), equation 4: the geometric mean of clipped ratios.

    The clip range applies to the logarithm, on the pessimistic side. Each token has the loss of
    its sample. The sample's weight is the geometric mean of its tokens' weights.
    """
    new_C, old_C, advantages_C, weights_C = _tokens(sample)
    taken, slopes = [], []
    for x, advantage in zip(new_C - old_C, advantages_C, strict=True):
        c = min(max(x, -settings.clip_low), settings.clip_high)
        best = min(x, c) if advantage > 0 else max(x, c)
        taken.append(best)
        slopes.append(float(best == x))
    ratio, number = np.exp(np.mean(taken)), len(taken)
    weight = np.exp(np.mean(np.log(weights_C + 1e-10)))
    loss = -np.mean(advantages_C) * ratio * weight
    return np.full(number, loss), np.tile(loss * np.array(slopes) / number, (number, 1))


def clip_cov(sample: Sample, settings: SimpleNamespace, chosen_C: Any) -> Losses:
    """Clip-Cov (arXiv 2505.22617), equation 12: PPO's loss, and 0 for the chosen tokens."""
    unbounded = SimpleNamespace(**{**vars(settings), "clip_ratio_c": np.inf})
    losses_C, slopes_CC = vanilla(sample, unbounded)
    return losses_C * ~chosen_C, slopes_CC * ~chosen_C


def kl_cov(sample: Sample, settings: SimpleNamespace, chosen_C: Any) -> Losses:
    """KL-Cov (arXiv 2505.22617), equation 14: -A r, with a penalty |log r| on the chosen tokens."""
    new_C, old_C, advantages_C, weights_C = _tokens(sample)
    ratio_C, penalty = np.exp(new_C - old_C), settings.policy_loss.ppo_kl_coef * chosen_C
    losses_C = -advantages_C * ratio_C + penalty * np.abs(new_C - old_C)
    slopes_C = -advantages_C * ratio_C + penalty * np.sign(new_C - old_C)
    return losses_C * weights_C, np.diag(slopes_C * weights_C)


LOSSES = {
    function.__name__: function
    for function in (vanilla, gspo, geo_mean, cispo, gpg, clip_cov, kl_cov, sapo, dppo_tv, dppo_kl)
}


def total(mode: str, batch: Batch, losses: list[Losses], scale: float) -> tuple[float, list[Any]]:
    """Return a mini-batch's loss and its derivatives with respect to each sample's log-probs [C].

    Sources: for token-mean, DAPO (arXiv 2503.14476), equation 8; for seq-mean-token-mean, GRPO
    (arXiv 2402.03300), equation 3; for seq-mean-token-sum-norm, Dr. GRPO (arXiv 2503.20783), whose
    divisor is fixed.

    Args:
        mode: verl's loss_agg_mode.
        batch: The samples.
        losses: The samples' losses and derivatives.
        scale: The fixed divisor of seq-mean-token-sum-norm.
    """
    numbers = [len(sample.counted) for sample in batch]
    samples, tokens = sum(number > 0 for number in numbers), sum(numbers)
    loss, slopes = 0.0, []
    for number, (losses_C, slopes_CC) in zip(numbers, losses, strict=True):
        weight = {
            "token-mean": 1 / tokens,
            "seq-mean-token-sum": 1 / samples,
            "seq-mean-token-mean": 1 / (samples * max(number, 1)),
            "seq-mean-token-sum-norm": 1 / (samples * scale),
        }[mode]
        loss += float(weight * losses_C.sum())
        slopes.append(weight * slopes_CC.sum(axis=0))
    return loss, slopes


def kl(estimator: str, new: float, reference: float) -> float:
    """Return k1, |k1|, k2 or k3 from J. Schulman, Approximating KL divergence (2020)."""
    difference = reference - new
    return {
        "kl": -difference,
        "abs": abs(difference),
        "mse": difference**2 / 2,
        "low_var_kl": np.exp(difference) - 1 - difference,
    }[estimator]


def value(predicted: float, before: float, target: float, clip: float) -> tuple[float, float]:
    """Return the clipped value loss of PPO (openai/baselines) and its derivative."""
    limited = min(max(predicted, before - clip), before + clip)
    free, cut = (predicted - target) ** 2, (limited - target) ** 2
    if free >= cut:
        return free / 2, predicted - target
    return cut / 2, (limited - target) * (abs(predicted - before) < clip)
