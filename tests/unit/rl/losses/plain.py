"""The losses as their papers define them, in numpy with double precision.

Each function takes one sample and returns the losses of its tokens that are included in the loss.
Dimensions: G is the number of these tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Sequence:
    """The tokens of a sample that are included in the loss, [G] each."""

    new: Array
    old: Array
    A: Array
    weight: Array


def vanilla(s: Sequence, low=0.2, high=0.3, c=3.0) -> Array:
    r = np.exp(s.new - s.old)
    loss = np.maximum(-s.A * r, -s.A * np.clip(r, 1 - low, 1 + high))
    return s.weight * np.where(s.A < 0, np.minimum(loss, -s.A * c), loss)


def gspo(s: Sequence, low=0.2, high=0.3) -> Array:
    """Return GSPO's loss, which clips (pi(y) / pi_old(y)) ^ (1 / |y|)."""
    ratio = (np.exp(s.new.sum()) / np.exp(s.old.sum())) ** (1 / len(s.new))
    clipped = min(max(ratio, 1 - low), 1 + high)
    return s.weight * np.array([max(-a * ratio, -a * clipped) for a in s.A])


def geo_mean(s: Sequence, low=0.2, high=0.3) -> Array:
    """Return GMPO's loss.

    Its ratio is the product of min(r, clip(r, e^-low, e^high)), or max for A < 0, to the power of
    1 / |y|.
    """
    r = np.exp(s.new - s.old)
    limited = np.clip(r, np.exp(-low), np.exp(high))
    A = s.A.mean()
    taken = np.where(s.A > 0, np.minimum(r, limited), np.where(s.A < 0, np.maximum(r, limited), 1))
    loss = -A * np.prod(taken) ** (1 / len(r)) * np.prod(s.weight) ** (1 / len(r))
    return np.full(len(r), loss)


def gpg(s: Sequence) -> Array:
    return -s.weight * s.new * s.A


def cispo(s: Sequence, low=0.2, high=0.3) -> Array:
    return -s.weight * np.clip(np.exp(s.new - s.old), 1 - low, 1 + high) * s.A * s.new


def dppo_tv(s: Sequence, low=0.2, high=0.3, c=3.0) -> Array:
    moved = np.exp(s.new) - np.exp(s.old)
    kept = np.where(s.A > 0, moved <= high, -moved <= low)
    return -s.weight * s.A * np.minimum(np.exp(s.new - s.old), c) * s.new * kept


def dppo_kl(s: Sequence, low=0.2, high=0.3, c=3.0) -> Array:
    p, q = np.exp(s.new), np.exp(s.old)
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q + 1e-8) / (1 - p + 1e-8))
    kept = np.where(s.A > 0, (kl <= high) | (p <= q), (kl <= low) | (p >= q))
    return -s.weight * s.A * np.minimum(p / q, c) * s.new * kept


def sapo(s: Sequence, pos=1.0, neg=1.05) -> Array:
    tau = np.where(s.A > 0, pos, neg)
    r = np.exp(s.new - s.old)
    return -s.weight * s.A * 4 / tau / (1 + np.exp(-tau * (r - 1)))


PLAIN: dict[str, Callable[[Sequence], Array]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "geo_mean": geo_mean,
    "gpg": gpg,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "sapo": sapo,
}


def dppo_clips(s: Sequence, loss: Array, c=3.0) -> tuple[Array, Array]:
    """Return DPPO's reports: a token whose loss is 0 is clipped, but never truncated as well."""
    return loss == 0, (np.exp(s.new - s.old) > c) & (loss != 0)


def clips(name: str, s: Sequence, low=0.2, high=0.3, c=3.0) -> tuple[Array, Array]:
    """Return whether each token is clipped, and whether the bound for negative advantages applies.

    A token is clipped if the clip changes its loss; in CISPO and GMPO, if its ratio is out of
    range. GMPO distinguishes clipped ratios with positive and negative advantages.
    """
    r = np.exp(s.new - s.old)
    if name == "gspo":
        r = np.full(len(r), np.exp(np.mean(s.new - s.old)))
    none = np.zeros(len(r), bool)
    limited = np.clip(r, 1 - low, 1 + high)
    if name in ("vanilla", "gspo"):
        loss = np.maximum(-s.A * r, -s.A * limited)
        dual = (s.A < 0) & (loss > -s.A * c) if name == "vanilla" else none
        return -s.A * limited > -s.A * r, dual
    if name == "cispo":
        return r != limited, none
    if name == "geo_mean":
        beyond = (s.new - s.old < -low) | (s.new - s.old > high)
        return beyond & (s.A > 0), beyond & (s.A < 0)
    if name in ("dppo_tv", "dppo_kl"):
        return dppo_clips(s, PLAIN[name](s), c)
    return none, none
