"""The choice, from a mini-batch, of the tokens that Clip-Cov drops or that KL-Cov penalises.

Tokens are chosen from the entire mini-batch, on all ranks and in all micro-batches. The choice uses
log-probs under the weights before the mini-batch's update. Therefore the choice does not depend on
the parallel layout or the micro-batches, whereas verl chooses separately in each micro-batch.
Clip-Cov draws tokens by a hash of their place in the step, so a restart draws the same tokens.

Source: arXiv 2505.22617, equations 10 to 14; verl's compute_policy_loss_clip_cov and _kl_cov for
    counts and bounds. Dimensions: T is the number of the mini-batch's response tokens on this
    data-parallel rank.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.rl.estimators.types import Floats, Ranks
from pipeline.rl.losses.types import LossSettings

Bools = npt.NDArray[np.bool_]
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Choice:
    """The tokens from which a loss chooses."""

    logprobs_T: Floats
    """Log-probs under the weights before the mini-batch's update."""
    old_T: Floats
    """Log-probs at the step's start."""
    advantages_T: Floats
    mask_T: Bools
    """Whether a token is included in the loss; other tokens are never chosen."""
    drawn_T: Keys
    """A random number for each token, which depends only on the token's place in the step."""
    ranks: Ranks


def choose_clipped(tokens: Choice, settings: LossSettings) -> Bools:
    """Draw Clip-Cov's tokens, and return whether each token is drawn, [T].

    Of the N tokens in the loss, max(1, clip_cov_ratio N) are drawn. A token may be drawn if its
    covariance is between clip_cov_lb and clip_cov_ub, and if PPO's clip does not change its loss.
    """
    policy_loss, A_T = settings.policy_loss, tokens.advantages_T
    covariance_T, number = _covariance(tokens)
    ratio_T = np.exp(np.clip(tokens.logprobs_T - tokens.old_T, -20, 20))
    limited_T = np.clip(ratio_T, 1 - settings.clip_low, 1 + settings.clip_high)
    among_T = tokens.mask_T & (-A_T * limited_T <= -A_T * ratio_T)
    among_T &= (covariance_T > policy_loss.clip_cov_lb) & (covariance_T < policy_loss.clip_cov_ub)
    return _largest(tokens.drawn_T, among_T, _share(policy_loss.clip_cov_ratio, number), tokens)


def choose_penalised(tokens: Choice, settings: LossSettings) -> Bools:
    """Choose KL-Cov's tokens, and return whether each token is chosen, [T].

    Of the N tokens in the loss, the max(1, kl_cov_ratio N) with the largest covariance are chosen.
    """
    covariance_T, number = _covariance(tokens)
    share = _share(settings.policy_loss.kl_cov_ratio, number)
    return _largest(_in_order(covariance_T), tokens.mask_T, share, tokens)


def _share(ratio: float, number: int) -> int:
    return max(1, int(ratio * number)) if number else 0


def _covariance(tokens: Choice) -> tuple[Floats, int]:
    """Return the covariance of each token, and the number of tokens in the loss.

    The covariance of a token excluded from the loss is 0.
    """
    mask_T = tokens.mask_T
    sums = tokens.ranks.total(
        np.array([mask_T.sum(), tokens.advantages_T[mask_T].sum(), tokens.logprobs_T[mask_T].sum()])
    )
    advantage, logprob = sums[1:] / max(sums[0], 1)
    made_T = (tokens.logprobs_T - logprob) * (tokens.advantages_T - advantage)
    return np.where(mask_T, made_T, 0.0), int(sums[0])


def _in_order(values_T: Floats) -> Keys:
    """Map floating-point numbers to integers in the same order, by their bits (IEEE 754)."""
    bits_T = (values_T + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    sign = np.uint64(1 << 63)
    keys_T: Keys = np.where(bits_T & sign, ~bits_T, bits_T | sign)
    return keys_T


def _largest(keys_T: Keys, among_T: Bools, number: int, tokens: Choice) -> Bools:
    """Return whether each token is one of the `number` tokens with the largest keys on all ranks.

    Only tokens in `among_T` are considered; if there are fewer than `number`, all of them are
    chosen. Among equal keys, the random numbers in `drawn_T` decide; no two tokens have the same
    random number.
    """
    least, above = _threshold(keys_T, among_T, number, tokens.ranks)
    chosen_T: Bools = among_T & (keys_T > least)
    tied_T = among_T & (keys_T == least)
    drawn, _ = _threshold(tokens.drawn_T, tied_T, number - above, tokens.ranks)
    chosen_T |= tied_T & (tokens.drawn_T >= drawn)
    return chosen_T


def _threshold(keys_T: Keys, among_T: Bools, number: int, ranks: Ranks) -> tuple[np.uint64, int]:
    """Return the `number`-th largest key on all ranks, and the number of larger keys.

    If there are fewer than `number` keys, the first result is 0. The key is found one byte at a
    time, starting with the highest. For each byte, the ranks count how many of the remaining keys
    have each value of that byte.
    """
    least, above = 0, 0
    for shift in range(56, -8, -8):
        digits_T = (keys_T[among_T] >> np.uint64(shift)) & np.uint64(255)
        counts = ranks.total(np.bincount(digits_T.astype(np.int64), minlength=256).astype(float))
        at_least = above + np.cumsum(counts[::-1])[::-1]
        reached = np.flatnonzero(at_least >= number)
        digit = int(reached[-1]) if len(reached) else 0
        above = int(at_least[digit] - counts[digit])
        among_T = among_T & (((keys_T >> np.uint64(shift)) & np.uint64(255)) == digit)
        least = least << 8 | digit
    return np.uint64(least), above
