"""The correction metrics, computed from their descriptions in docs/corrections.md.

Samples without a token in the loss are left out. A value per sequence is a list with one number per
sample; a value per token is a list of such lists.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.unit.rl.reference.batch import Batch, Sample
from tests.unit.rl.reference.corrections import kept, vetoed, weights

Found = dict[str, float | None]
PerToken = list[list[float]]
SHARES = {"q01": 0.01, "q05": 0.05, "q50": 0.5, "q95": 0.95, "q99": 0.99}


@dataclass(frozen=True)
class Settings:
    """The settings of a correction."""

    level: str | None = None
    lower: float | None = None
    """The lower bound for weights; None if they have only an upper bound."""
    upper: float = math.inf
    normalized: bool = False
    forms: dict[str, tuple[float | None, float]] = field(default_factory=dict)
    """The bounds for each form of rejection; for k1, they apply to 1 / r."""
    veto: float | None = None


LIMIT = 20.0
"""The largest logarithm of a perplexity."""


def metrics(batch: Batch, settings: Settings) -> Found:
    """Return all metrics of a correction."""
    known = [one for one in batch if one.counted]
    found = _distances(known) | {"rollout_is_mean": None}
    if settings.level is not None:
        found |= _weights(known, settings)
    passed = []
    for form, (lower, upper) in settings.forms.items():
        passed.append(kept(known, form, lower, upper))
        of_form = _form(known, form, lower, upper)
        found |= {f"rollout_rs_{form}_{name}": value for name, value in of_form.items()}
    if settings.veto is not None:
        low = vetoed(known, settings.veto)
        passed.append([[not one] * len(of.counted) for one, of in zip(low, known, strict=True)])
        found["rollout_is_veto_fraction"] = _share(low)
        found["rollout_is_catastrophic_token_fraction"] = _share(
            [math.exp(log) < settings.veto for one in known for log in _logs(one)]
        )
    if passed:
        both = [[all(one) for one in zip(*of, strict=True)] for of in zip(*passed, strict=True)]
        found["rollout_rs_masked_fraction"] = _share([not one for of in both for one in of])
        found["rollout_rs_seq_masked_fraction"] = _share([not all(of) for of in both])
        found["rollout_rs_seq_rejected_fraction"] = _share([not any(of) for of in both])
    return {f"rollout_corr/{name}": value for name, value in found.items()}


def _logs(sample: Sample) -> list[float]:
    return [float(sample.old_L[t] - sample.engine_L[t]) for t in sample.counted]


def _mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def _share(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


def _spread(numbers: list[float]) -> float:
    """Return the standard deviation with divisor n - 1; 0 for a single number."""
    return statistics.stdev(numbers) if len(numbers) > 1 else 0.0


def _quantile(numbers: list[float], share: float) -> float:
    """Return the smallest number that at least this share of all numbers do not exceed."""
    ordered = sorted(numbers)
    return next(x for n, x in enumerate(ordered, 1) if n >= share * len(ordered))


def _distances(known: Batch) -> Found:
    logs = [log for one in known for log in _logs(one)]
    sums = [math.fsum(_logs(one)) for one in known]
    trainer = [-_mean([float(one.old_L[t]) for t in one.counted]) for one in known]
    engine = [-_mean([float(one.engine_L[t]) for t in one.counted]) for one in known]
    apart = [mine - other for mine, other in zip(trainer, engine, strict=True)]
    found: Found = {
        "dropped_fraction": 0.0 if logs else None,
        "kl": _mean([-log for log in logs]),
        "k3_kl": _mean([math.exp(log) - 1 - log for log in logs]),
        "training_ppl": _mean([math.exp(min(one, LIMIT)) for one in trainer]),
        "rollout_ppl": _mean([math.exp(min(one, LIMIT)) for one in engine]),
        "training_log_ppl": _mean(trainer),
        "rollout_log_ppl": _mean(engine),
        "log_ppl_diff": _mean(apart),
        "log_ppl_abs_diff": _mean([abs(one) for one in apart]),
        "log_ppl_diff_max": max(apart),
        "log_ppl_diff_min": min(apart),
        "ppl_ratio": _mean([math.exp(one) for one in apart]),
        "chi2_token": _mean([math.exp(log) ** 2 - 1 for log in logs]),
        "chi2_seq": _mean([math.exp(one) ** 2 - 1 for one in sums]),
    }
    for name, share in SHARES.items():
        found[f"ratio_token_{name}"] = math.exp(_quantile(logs, share))
        found[f"ratio_seq_{name}"] = math.exp(_quantile(sums, share))
    return found


def _weights(known: Batch, settings: Settings) -> Found:
    level, lower, upper = settings.level, settings.lower, settings.upper
    assert level is not None
    bounded = weights(known, level, lower, upper, normalized=False)
    before = weights(known, level, None, math.inf, normalized=False)
    flat = [weight for of in bounded for weight in of]
    each = [_mean(of) for of in bounded]
    own = [w for of in before for w in of] if level == "token" else [_mean(of) for of in before]
    extremes = flat if level == "token" else own
    low = 1 / upper if lower is None else lower
    square = math.fsum(weight**2 for weight in flat)
    found: Found = {
        "rollout_is_mean": _mean(flat),
        "rollout_is_std": statistics.pstdev(flat),
        "rollout_is_eff_sample_size": math.fsum(flat) ** 2 / (len(flat) * square) if square else 0,
        "rollout_is_max": max(extremes),
        "rollout_is_min": min(extremes),
        "rollout_is_ratio_fraction_high": _share([weight > upper for weight in own]),
        "rollout_is_ratio_fraction_low": _share([weight < low for weight in own]),
        "rollout_is_seq_mean": _mean(each),
        "rollout_is_seq_std": _spread(each),
        "rollout_is_seq_max": max(each),
        "rollout_is_seq_min": min(each),
        "rollout_is_seq_max_deviation": max(abs(one - 1) for one in each),
        "rollout_is_seq_fraction_high": _share([_mean(of) > upper for of in before]),
        "rollout_is_seq_fraction_low": _share([_mean(of) < low for of in before]),
    }
    if lower is not None:
        found["rollout_is_oob_ratio"] = _share([weight == 0 for weight in flat])
    if settings.normalized:
        mean = _mean(flat if level == "token" else each)
        found["rollout_is_batch_norm_factor"] = mean if mean > 0 else 1.0
    return found


def _form(known: Batch, form: str, lower: float | None, upper: float) -> Found:
    of_what, _, kind = form.rpartition("_")
    statistic: Callable[[float], float] = {
        "k1": lambda log: -log,
        "k2": lambda log: log**2 / 2,
        "k3": lambda log: math.exp(log) - 1 - log,
    }[kind]
    low, high = 0.0, upper
    if kind == "k1":
        low, high = math.log(lower or 1 / upper), math.log(upper)
    tokens = [[statistic(log) for log in _logs(one)] for one in known]
    whole = {"seq_sum": math.fsum, "seq_max": max}.get(of_what, _mean)
    each = [float(whole(of)) for of in tokens]
    if of_what != "token":
        tokens = [[one] * len(of) for one, of in zip(each, tokens, strict=True)]
    flat = [value for of in tokens for value in of]
    own = flat if of_what == "token" else each
    passed = kept(known, form, lower, upper)
    return {
        "mean": _mean(flat),
        "std": statistics.pstdev([min(max(value, low), high) for value in flat]),
        "max": max(own),
        "min": min(own),
        "fraction_high": _share([value > high for value in own]),
        "fraction_low": _share([value < low for value in own]),
        "seq_mean": _mean(each),
        "seq_std": _spread(each),
        "seq_max": max(each),
        "seq_min": min(each),
        "seq_max_deviation": max(abs(one) for one in each),
        "seq_fraction_high": _share([one > high for one in each]),
        "seq_fraction_low": _share([one < low for one in each]),
        "masked_fraction": _share([not one for of in passed for one in of]),
        "seq_masked_fraction": _share([not all(of) for of in passed]),
    }
