"""Which tokens of a mini-batch Clip-Cov and KL-Cov hold back.

The set to choose from is the whole mini-batch, on all ranks and in all micro-batches, with the
log-probs of the weights that the mini-batch changes. So the choice depends on neither the parallel
layout nor the cut into micro-batches; verl chooses anew in each micro-batch. What is drawn is drawn
by a hash of each token's place in the step, so a restart draws the same.

Source: arXiv 2505.22617, equations 10 to 14; verl's compute_policy_loss_clip_cov and _kl_cov for
counts and bounds. Letters: T response tokens of the mini-batch that this data-parallel rank holds.
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
    """The tokens to choose from."""

    logprobs_T: Floats
    """Of the weights that the mini-batch will change."""
    old_T: Floats
    advantages_T: Floats
    mask_T: Bools
    """Whether a token counts; no other is ever chosen."""
    drawn_T: Keys
    """A random number of each token, which depends on its place in the step alone."""
    ranks: Ranks


def choose_clipped(tokens: Choice, settings: LossSettings) -> Bools:
    """Clip-Cov: draw max(1, clip_cov_ratio N) of the tokens whose covariance lies between
    clip_cov_lb and clip_cov_ub and whose loss PPO's clip leaves alone; [T]."""
    policy_loss, A_T = settings.policy_loss, tokens.advantages_T
    covariance_T, number = _covariance(tokens)
    ratio_T = np.exp(np.clip(tokens.logprobs_T - tokens.old_T, -20, 20))
    limited_T = np.clip(ratio_T, 1 - settings.clip_low, 1 + settings.clip_high)
    among_T = tokens.mask_T & (-A_T * limited_T <= -A_T * ratio_T)
    among_T &= (covariance_T > policy_loss.clip_cov_lb) & (covariance_T < policy_loss.clip_cov_ub)
    return _largest(tokens.drawn_T, among_T, _share(policy_loss.clip_cov_ratio, number), tokens)


def choose_penalised(tokens: Choice, settings: LossSettings) -> Bools:
    """KL-Cov: the max(1, kl_cov_ratio N) tokens of the largest covariance; [T]."""
    covariance_T, number = _covariance(tokens)
    share = _share(settings.policy_loss.kl_cov_ratio, number)
    return _largest(_in_order(covariance_T), tokens.mask_T, share, tokens)


def _share(ratio: float, number: int) -> int:
    return max(1, int(ratio * number)) if number else 0


def _covariance(tokens: Choice) -> tuple[Floats, int]:
    """Each token's covariance, 0 where it does not count, and the number of those that count."""
    mask_T = tokens.mask_T
    sums = tokens.ranks.total(
        np.array([mask_T.sum(), tokens.advantages_T[mask_T].sum(), tokens.logprobs_T[mask_T].sum()])
    )
    advantage, logprob = sums[1:] / max(sums[0], 1)
    made_T = (tokens.logprobs_T - logprob) * (tokens.advantages_T - advantage)
    return np.where(mask_T, made_T, 0.0), int(sums[0])


def _in_order(values_T: Floats) -> Keys:
    """Whole numbers in the order of floating-point numbers, by their bits (IEEE 754)."""
    bits_T = (values_T + 0.0).view(np.uint64)  # -0.0 becomes 0.0
    sign = np.uint64(1 << 63)
    keys_T: Keys = np.where(bits_T & sign, ~bits_T, bits_T | sign)
    return keys_T


def _largest(keys_T: Keys, among_T: Bools, number: int, tokens: Choice) -> Bools:
    """The tokens with the largest keys over all ranks, `number` of them if there are as many. Of
    equal ones the draw decides, as two tokens never draw the same."""
    least, above = _threshold(keys_T, among_T, number, tokens.ranks)
    chosen_T: Bools = among_T & (keys_T > least)
    tied_T = among_T & (keys_T == least)
    drawn, _ = _threshold(tokens.drawn_T, tied_T, number - above, tokens.ranks)
    chosen_T |= tied_T & (tokens.drawn_T >= drawn)
    return chosen_T


def _threshold(keys_T: Keys, among_T: Bools, number: int, ranks: Ranks) -> tuple[np.uint64, int]:
    """The `number`-th largest key over all ranks (0: there are fewer), and how many are larger.

    Digit by digit from the highest, from counts of each digit's values alone.
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
