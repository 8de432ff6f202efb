"""Computation of weights and rejections from log-probs.

Dimensions: T is the number of response tokens of whole samples, concatenated; C is the number of
    tokens included in the loss; X is the number of samples.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from pipeline.rl.corrections.forms import Correction, Rejection
from pipeline.rl.moments import Moments, Tally, bins, moments

LOG_LIMIT = 20.0
"""Bound on log-ratios, which are clipped to +-20 before they are exponentiated, as in verl."""

Floats = npt.NDArray[np.float64]
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sampled:
    """Log-probs of sampled tokens under two policies."""

    trainer_T: npt.NDArray[np.float32]
    engine_T: npt.NDArray[np.float32]
    mask_T: _Bools
    """Whether a token is included in the loss; log-probs of other tokens are ignored."""
    lengths_X: npt.NDArray[np.int64]
    """Number of tokens of each sample; the sum is T."""


@dataclass(frozen=True)
class Corrected:
    """The result of a correction."""

    weights_T: npt.NDArray[np.float32] | None
    """The tokens' weights, 0 for tokens excluded from the loss; None if the correction has no
    weights."""
    mask_T: _Bools
    """Whether a token was included in the loss before, and is neither dropped nor rejected."""
    tally: Tally
    """The statistics of the tokens included in the loss before rejection, without dropped ones."""


@dataclass(frozen=True)
class _Ratios:
    """log r of the tokens included in the loss, and the samples to which they belong."""

    log_C: Floats
    sample_C: npt.NDArray[np.int64]
    """The sample of each token, as an index of X."""
    count_X: npt.NDArray[np.int64]
    """Number of each sample's tokens that are included in the loss."""

    @property
    def known_X(self) -> _Bools:
        """Whether a sample has a token in the loss; the metrics omit other samples."""
        return self.count_X > 0

    def total_X(self, values_C: Floats) -> Floats:
        """Return each sample's sum, added in token order so that it is equal in every layout."""
        return np.bincount(self.sample_C, values_C, len(self.count_X)).astype(np.float64)

    def mean_X(self, values_C: Floats) -> Floats:
        """Return each sample's mean; 0 for a sample without tokens in the loss."""
        mean_X: Floats = self.total_X(values_C) / np.maximum(self.count_X, 1)
        return mean_X

    def most_X(self, values_C: Floats) -> Floats:
        """Return the largest value of each sample; 0 for a sample without tokens in the loss.

        All values must be at least 0.
        """
        most_X = np.zeros(len(self.count_X))
        np.maximum.at(most_X, self.sample_C, values_C)
        return most_X


def correct(correction: Correction, sampled: Sampled, needs_engine: bool = False) -> Corrected:
    """Drop tokens without a usable log-prob, compute the weights, and reject tokens.

    A token is dropped if the trainer's log-prob is not finite. If the engine's is not finite, the
    token is dropped only if the correction or the caller needs it. A dropped token is treated like
    a token that the loss never included, so it affects no statistic of its sequence.

    The weights and the rejection criteria are independent of each other: all use every token that
    is included in the loss before rejection. The weights are not normalized yet, because
    normalization requires the tally of all ranks (`normalized`). The computation uses float64.

    Args:
        correction: The correction.
        sampled: The tokens.
        needs_engine: Whether the loss uses the engine's log-probs even without a correction.
    """
    with np.errstate(invalid="ignore"):  # inf - inf
        log_T = sampled.trainer_T.astype(np.float64) - sampled.engine_T
    known_T = sampled.mask_T & np.isfinite(log_T)
    sample_C = np.repeat(np.arange(len(sampled.lengths_X)), sampled.lengths_X)[known_T]
    count_X = np.bincount(sample_C, minlength=len(sampled.lengths_X))
    ratios = _Ratios(log_T[known_T], sample_C, count_X)
    tally = _distances(sampled, known_T, ratios)
    weights_T = None
    if correction.level is not None:
        weights_C, of_weights = _weights(correction, ratios)
        weights_T = np.zeros(len(known_T), np.float32)
        weights_T[known_T] = weights_C
        tally += of_weights
    kept_C, of_rejection = _kept(correction, ratios)
    usable_T = known_T
    if not (correction.needs_engine or needs_engine):
        usable_T = sampled.mask_T & np.isfinite(sampled.trainer_T)
    kept_T = usable_T.copy()
    kept_T[known_T] = kept_C
    dropped = Tally({"dropped": moments(~usable_T[sampled.mask_T])})
    return Corrected(weights_T, kept_T, tally + of_rejection + dropped)


def normalized(corrected: Corrected, correction: Correction, of_all: Tally) -> Corrected:
    """Divide the weights by their mean over tokens, or over sequences if weights are per sequence.

    The mean includes rejected tokens, as in verl. A mean of 0 leaves the weights unchanged.

    Args:
        corrected: The result of `correct` on this rank.
        correction: The correction.
        of_all: The sum of the tallies from all ranks.
    """
    mean = mean_weight(correction, of_all)
    if corrected.weights_T is None or mean is None:
        return corrected
    divided_T = (corrected.weights_T.astype(np.float64) / mean).astype(np.float32)
    return replace(corrected, weights_T=divided_T)


def mean_weight(correction: Correction, of_all: Tally) -> float | None:
    """Return the mean by which weights are divided; None if they are not divided."""
    if not correction.normalized or correction.level is None:
        return None
    return of_all["weights" if correction.level == "token" else "weights_seq"].mean or None


def _weights(correction: Correction, ratios: _Ratios) -> tuple[Floats, Tally]:
    """Return the weights before normalization, [C], and their statistics."""
    known_X, lower, upper = ratios.known_X, correction.bounds.lower, correction.bounds.upper
    if correction.level == "token":
        log_C = ratios.log_C
    else:
        of_sample = ratios.total_X if correction.level == "sequence" else ratios.mean_X
        log_C = of_sample(ratios.log_C)[ratios.sample_C]
    raw_C = np.exp(np.clip(log_C, -LOG_LIMIT, LOG_LIMIT))
    outside_C = (raw_C > upper) | (raw_C < (0 if lower is None else lower))
    weights_C = np.minimum(raw_C, upper) if lower is None else np.where(outside_C, 0.0, raw_C)
    below = 1 / upper if lower is None else lower
    seq_X, raw_X = ratios.mean_X(weights_C)[known_X], ratios.mean_X(raw_C)[known_X]
    level_C = (raw_C, raw_X)[correction.level != "token"]
    found = {
        "weights": weights_C,
        "weights_raw": level_C,
        "weights_high": level_C > upper,
        "weights_low": level_C < below,
        "weights_seq": seq_X,
        "weights_seq_off": np.abs(seq_X - 1.0),
        "weights_seq_high": raw_X > upper,
        "weights_seq_low": raw_X < below,
    }
    if lower is not None:
        found["weights_outside"] = outside_C
    return weights_C, Tally({name: moments(values) for name, values in found.items()})


def _kept(correction: Correction, ratios: _Ratios) -> tuple[_Bools, Tally]:
    kept_C = np.ones(len(ratios.log_C), np.bool_)
    found: dict[str, Moments] = {}
    for rejection in correction.rejections:
        of_form_C, of_form = _passed(rejection, ratios)
        kept_C &= of_form_C
        found |= {f"{rejection.form}{name}": value for name, value in of_form.items()}
    if correction.veto is not None:
        low_C = ratios.log_C < np.log(correction.veto)
        vetoed_X = ratios.total_X(low_C.astype(np.float64)) > 0
        kept_C &= ~vetoed_X[ratios.sample_C]
        found |= {"veto_tokens": moments(low_C), "veto": moments(vetoed_X[ratios.known_X])}
    if correction.rejections or correction.veto is not None:
        found |= {
            "rejected": moments(~kept_C),
            "rejected_seq": moments(_any_X(~kept_C, ratios)),
            "rejected_whole": moments(~_any_X(kept_C, ratios)),
        }
    return kept_C, Tally(found)


def _passed(rejection: Rejection, ratios: _Ratios) -> tuple[_Bools, dict[str, Moments]]:
    """Return whether each token passes a criterion, [C], and the moments of the statistic."""
    log_C = np.clip(ratios.log_C, -LOG_LIMIT, LOG_LIMIT)
    of_what, _, kind = rejection.form.rpartition("_")
    token_C = {"k1": -log_C, "k2": 0.5 * log_C**2, "k3": np.exp(log_C) - 1.0 - log_C}[kind]
    if rejection.of_tokens:
        found_C, found_X = token_C, ratios.mean_X(token_C)
    else:
        of_sample = {
            "seq_sum": ratios.total_X,
            "seq_mean": ratios.mean_X,
            "seq_max": ratios.most_X,
        }
        found_X = of_sample[of_what](token_C)
        found_C = found_X[ratios.sample_C]
    lower, upper = rejection.bounds.lower, rejection.bounds.upper
    high_C, high_X = found_C > upper, found_X[ratios.known_X] > upper
    low_C = np.zeros_like(high_C) if lower is None else found_C < lower
    low_X = np.zeros_like(high_X) if lower is None else found_X[ratios.known_X] < lower
    passed_C = ~(high_C | low_C)
    own = (high_C, low_C) if rejection.of_tokens else (high_X, low_X)
    return passed_C, {
        "": moments(found_C),
        "_cut": moments(np.clip(found_C, 0.0 if lower is None else lower, upper)),
        "_seq": moments(found_X[ratios.known_X]),
        "_high": moments(own[0]),
        "_low": moments(own[1]),
        "_seq_high": moments(high_X),
        "_seq_low": moments(low_X),
        "_rejected": moments(~passed_C),
        "_rejected_seq": moments(_any_X(~passed_C, ratios)),
    }


def _any_X(values_C: _Bools, ratios: _Ratios) -> _Bools:
    return ratios.total_X(values_C.astype(np.float64))[ratios.known_X] > 0


def _distances(sampled: Sampled, known_T: _Bools, ratios: _Ratios) -> Tally:
    """Return statistics of the distances between the two policies.

    These statistics do not depend on the correction.
    """
    known_X = ratios.known_X
    cut_C = np.clip(ratios.log_C, -LOG_LIMIT, LOG_LIMIT)
    sum_X = ratios.total_X(ratios.log_C)[known_X]
    trainer_C = sampled.trainer_T[known_T].astype(np.float64)
    engine_C = sampled.engine_T[known_T].astype(np.float64)
    log_ppl_X, engine_log_ppl_X = (
        -ratios.mean_X(trainer_C)[known_X],
        -ratios.mean_X(engine_C)[known_X],
    )
    apart_X = log_ppl_X - engine_log_ppl_X
    found: Mapping[str, npt.ArrayLike] = {
        "training_ppl": np.exp(np.minimum(log_ppl_X, LOG_LIMIT)),
        "training_log_ppl": log_ppl_X,
        "rollout_ppl": np.exp(np.minimum(engine_log_ppl_X, LOG_LIMIT)),
        "rollout_log_ppl": engine_log_ppl_X,
        "kl": -ratios.log_C,
        "k3_kl": np.exp(cut_C) - 1.0 - cut_C,
        "log_ppl_diff": apart_X,
        "log_ppl_abs_diff": np.abs(apart_X),
        "ppl_ratio": np.exp(np.clip(apart_X, -LOG_LIMIT, LOG_LIMIT)),
        "chi2_token": np.exp(2 * cut_C),
        "chi2_seq": np.exp(2 * np.clip(sum_X, -LOG_LIMIT, LOG_LIMIT)),
    }
    return Tally(
        {name: moments(values) for name, values in found.items()},
        {"token": bins(cut_C), "seq": bins(np.clip(sum_X, -LOG_LIMIT, LOG_LIMIT))},
    )
