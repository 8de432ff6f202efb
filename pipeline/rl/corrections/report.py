"""Metrics for a correction, computed from the tally of all ranks.

A metric has verl's name if verl also computes it. In shares and means over tokens, all tokens have
the same weight; in metrics with seq in their name, all sequences have the same weight. Sequences
without a token in the loss are omitted, while verl counts them as zeros. docs/corrections.md
describes each metric.
"""

import math

from pipeline.rl.corrections.apply import mean_weight
from pipeline.rl.corrections.forms import Correction
from pipeline.rl.moments import Bins, Tally, quantiles

QUANTILES = {"q01": 0.01, "q05": 0.05, "q50": 0.5, "q95": 0.95, "q99": 0.99}

PREFIX = "rollout_corr/"

Metrics = dict[str, float | None]


def correction_metrics(correction: Correction, of_all: Tally) -> Metrics:
    """Return all metrics of a step.

    If the correction has no weights, `rollout_is_mean` is None, and the other metrics for weights
    are omitted. The metrics for rejections are omitted if the correction has no rejections, and
    those for the veto are omitted if it has no veto.
    """
    found = _distances(of_all) | {"rollout_is_mean": None}
    if correction.level is not None:
        found |= _weights(correction, of_all)
    for rejection in correction.rejections:
        found |= _rejection(rejection.form, rejection.of_tokens, of_all)
    if correction.rejections or correction.veto is not None:
        found |= {
            "rollout_rs_masked_fraction": of_all["rejected"].mean,
            "rollout_rs_seq_masked_fraction": of_all["rejected_seq"].mean,
            "rollout_rs_seq_rejected_fraction": of_all["rejected_whole"].mean,
        }
    if correction.veto is not None:
        found |= {
            "rollout_is_veto_fraction": of_all["veto"].mean,
            "rollout_is_catastrophic_token_fraction": of_all["veto_tokens"].mean,
        }
    return {f"{PREFIX}{name}": value for name, value in found.items()}


def _distances(of_all: Tally) -> Metrics:
    means = ("training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "kl", "k3_kl")
    found: Metrics = {name: of_all[name].mean for name in means}
    found["dropped_fraction"] = of_all["dropped"].mean
    found |= {
        "log_ppl_diff": of_all["log_ppl_diff"].mean,
        "log_ppl_abs_diff": of_all["log_ppl_abs_diff"].mean,
        "log_ppl_diff_max": of_all["log_ppl_diff"].largest,
        "log_ppl_diff_min": of_all["log_ppl_diff"].smallest,
        "ppl_ratio": of_all["ppl_ratio"].mean,
    }
    for level in ("token", "seq"):
        square = of_all[f"chi2_{level}"].mean
        found[f"chi2_{level}"] = None if square is None else square - 1.0
        logs = quantiles(of_all.bins.get(level, Bins()), tuple(QUANTILES.values()))
        for name, log in zip(QUANTILES, logs, strict=True):
            found[f"ratio_{level}_{name}"] = None if log is None else math.exp(log)
    return found


def _weights(correction: Correction, of_all: Tally) -> Metrics:
    weights, seq = of_all["weights"], of_all["weights_seq"]
    extremes = weights if correction.level == "token" else of_all["weights_raw"]
    found: Metrics = {
        "rollout_is_mean": weights.mean,
        "rollout_is_std": weights.deviation,
        "rollout_is_eff_sample_size": weights.effective,
        "rollout_is_max": extremes.largest,
        "rollout_is_min": extremes.smallest,
        "rollout_is_ratio_fraction_high": of_all["weights_high"].mean,
        "rollout_is_ratio_fraction_low": of_all["weights_low"].mean,
        "rollout_is_seq_mean": seq.mean,
        "rollout_is_seq_std": seq.unbiased,
        "rollout_is_seq_max": seq.largest,
        "rollout_is_seq_min": seq.smallest,
        "rollout_is_seq_max_deviation": of_all["weights_seq_off"].largest,
        "rollout_is_seq_fraction_high": of_all["weights_seq_high"].mean,
        "rollout_is_seq_fraction_low": of_all["weights_seq_low"].mean,
    }
    if correction.bounds.lower is not None:
        found["rollout_is_oob_ratio"] = of_all["weights_outside"].mean
    if correction.normalized:
        found["rollout_is_batch_norm_factor"] = mean_weight(correction, of_all) or 1.0
    return found


def _rejection(form: str, of_tokens: bool, of_all: Tally) -> Metrics:
    def of(part: str) -> float | None:
        return of_all[f"{form}_{part}"].mean

    tokens, seq = of_all[form], of_all[f"{form}_seq"]
    own = tokens if of_tokens else seq
    found: Metrics = {
        "mean": tokens.mean,
        "std": of_all[f"{form}_cut"].deviation,
        "max": own.largest,
        "min": own.smallest,
        "fraction_high": of("high"),
        "fraction_low": of("low"),
        "seq_mean": seq.mean,
        "seq_std": seq.unbiased,
        "seq_max": seq.largest,
        "seq_min": seq.smallest,
        "seq_max_deviation": max(abs(seq.most), abs(seq.least)) if seq.count else None,
        "seq_fraction_high": of("seq_high"),
        "seq_fraction_low": of("seq_low"),
        "masked_fraction": of("rejected"),
        "seq_masked_fraction": of("rejected_seq"),
    }
    return {f"rollout_rs_{form}_{name}": value for name, value in found.items()}
