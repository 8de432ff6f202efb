"""The step's metrics: the report of each rank, and the numbers computed from all reports.

A metric that was not measured has the value None; its key is still present.
pipeline/metrics/table.py describes the keys.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from operators.training.batches.step_data import StepData
from operators.training.critic_step import CriticReport
from operators.training.passes.custom_loss import OWN_REPORTS
from operators.training.passes.logprob_pass import LogProbs
from operators.training.replay.counts import Counts, added
from pipeline.metrics.metric import by_layer
from pipeline.rl.kl import StepKl
from pipeline.rl.mismatch import Mismatch, mismatch, total_mismatch
from pipeline.rl.moments import Tally
from pipeline.traces.format.manifest import BASELINE

Metrics = dict[str, float | None]
Sums = dict[str, float]


@dataclass(frozen=True)
class Spread:
    """A sum and extremes over tokens. The spreads of several ranks can be combined.

    Example: Spread(512, 0.25, -1.5, 2.0).
    """

    count: int
    total: float
    least: float
    largest: float


def spread_of(parts: Iterable[npt.NDArray[np.float32]]) -> Spread | None:
    """Return the spread of all values; None if there are no values."""
    values_T = np.concatenate([np.zeros(0, np.float32), *parts])
    if not len(values_T):
        return None
    total = float(values_T.sum(dtype=np.float64))
    return Spread(len(values_T), total, float(values_T.min()), float(values_T.max()))


@dataclass(frozen=True)
class RankReport:
    """One rank's numbers for a step, excluding what another rank reports."""

    mismatch: Mismatch | None = None
    """Mismatch of the log-prob pass; None if not measured, or if reported by another rank."""
    mismatch_native: Mismatch | None = None
    """Mismatch with native routing; None if not measured, or if reported by another rank."""
    updates: Sequence[Sums] = ()
    """Sums over tokens, per mini-batch, including the number of `tokens` and the loss's
    `divisor`."""
    reward_kl: StepKl | None = None
    """KL of the step over all ranks; None on earlier stages, and if the reward contains no KL."""
    critic: CriticReport | None = None
    """The critic's numbers; None if the run has no critic."""
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """Replay counts, keyed by the pass's name; every pass covers the entire step."""
    times_s: Sums = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    """Memory in GiB, keyed by metric."""
    fetched_bytes: int | None = None
    """Size in bytes of the recorded routes fetched from the store; None if none are read."""
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    """Number of samples for each reason why generation ended."""
    without_loss: int = 0
    """Number of samples that are not trained on because of their finish reason."""
    advantages: Spread | None = None
    """Advantages of tokens in the loss; None if there are none, or if reported by another rank."""
    corrections: Tally | None = None
    """The tally of the corrections; None if reported by another rank."""
    mismatch_older: Mismatch | None = None
    """Mismatch with the weights of the samples' version and native routing; None if not measured,
    or if reported by another rank."""
    staleness: Mismatch | None = None
    """Mismatch between the trainer's current weights and the weights of the samples' version, both
    with native routing; None if not measured, or if reported by another rank."""


def mismatch_of(data: StepData, logprobs: LogProbs, sampled: LogProbs | None = None) -> Mismatch:
    """Compare this rank's log-probs for the response tokens in the samples' loss masks.

    Args:
        data: This rank's data for the step.
        logprobs: The log-probs to compare.
        sampled: The log-probs to compare them with; None selects the engine's log-probs.
    """
    total = Mismatch(0, 0.0, 0)
    for id in sorted(logprobs):
        sample = data.samples[id]
        mask_G = sample.loss_mask_G
        of_G = sample.logprobs_G if sampled is None else sampled[id]
        total += mismatch(logprobs[id][mask_G], of_G[mask_G])
    return total


def finish_reasons_of(data: StepData) -> Counter[str]:
    """Count this data-parallel rank's samples by finish reason, excluding greedy baselines."""
    marks = data.manifest.rows["not_trained"].to_pylist()
    ids = (id for id, mark in zip(data.manifest.ids, marks, strict=True) if mark != BASELINE)
    return Counter(data.samples[id].finish_reason for id in ids)


def total_counts(reports: Sequence[RankReport]) -> dict[str, Counts]:
    """Add up all ranks' replay counts, for each pass (in the order of passes) and each layer."""
    names = dict.fromkeys(name for report in reports for name in report.counts)
    return {name: added(r.counts[name] for r in reports if name in r.counts) for name in names}


def total_tally(reports: Sequence[RankReport]) -> Tally:
    """Return the tally of the corrections over all ranks."""
    parts = (report.corrections for report in reports)
    return sum((part for part in parts if part is not None), start=Tally())


def training_metrics(
    reports: Sequence[RankReport], counts: Counts, grad_norms: Sequence[float]
) -> Metrics:
    """Return the training metrics: losses, mismatch, replay, times and memory.

    Losses are means over mini-batches. Times and memory are the largest values over all ranks.

    Args:
        reports: The reports of all ranks.
        counts: Counts from one pass with replay, over all ranks, keyed by layer; {} if nothing was
            replayed.
        grad_norms: Norms of the gradients, one for each mini-batch with an optimizer step.
    """
    mini_batches = _mini_batches(reports)

    def mean(name: str, over: str = "tokens") -> float | None:
        means = [sums[name] / max(sums[over], 1) for sums in mini_batches if name in sums]
        return float(np.mean(means)) if means else None

    log_ratio = mean("log_ratio")
    fetched = [r.fetched_bytes for r in reports if r.fetched_bytes is not None]
    reasons = sum((Counter(report.finish_reasons) for report in reports), Counter[str]())
    return {
        "actor/pg_loss": mean("policy", "divisor"),
        "actor/kl_loss": mean("kl", "divisor"),
        "actor/entropy": mean("entropy"),
        "actor/pg_clipfrac": mean("clipped"),
        "actor/pg_clipfrac_lower": mean("dual_clipped"),
        "actor/ppo_kl": None if log_ratio is None else 0.0 - log_ratio,
        "actor/tokens": sum(sums["tokens"] for sums in mini_batches),
        "actor/grad_norm": float(np.mean(grad_norms)) if len(grad_norms) else None,
        "response_length/clip_ratio": _share(reasons, "length"),
        "response/aborted_ratio": _share(reasons, "abort"),
        "response/masked": sum(report.without_loss for report in reports),
        **_advantage_metrics([report.advantages for report in reports]),
        **_mismatch_metrics(reports),
        **{f"policy_loss/{name}": mean(name) for name in _of_users(mini_batches)},
        **replay_metrics(counts),
        "replay/bytes_fetched": sum(fetched) if fetched else None,
        **_largest(_TIMES, [report.times_s for report in reports]),
        **_largest(_MEMORY, [report.memory for report in reports]),
    }


def _mismatch_metrics(reports: Sequence[RankReport]) -> Metrics:
    distances = {
        "": total_mismatch(report.mismatch for report in reports),
        "_native": total_mismatch(report.mismatch_native for report in reports),
        "_engine": total_mismatch(report.mismatch_older for report in reports),
        "_staleness": total_mismatch(report.staleness for report in reports),
    }
    found: Metrics = {}
    for name, of in distances.items():
        found[f"mismatch/kl{name}"] = None if of is None else of.kl
        found[f"mismatch/extreme_share{name}"] = None if of is None else of.extreme_share
    return found


def _of_users(mini_batches: Sequence[Sums]) -> list[str]:
    """Return the names that a user's loss reports in addition to the built-in ones."""
    named = {name for sums in mini_batches for name in sums}
    return sorted(named - OWN_REPORTS - {"clipped", "dual_clipped", "log_ratio"})


_TIMES = (
    "timing_s/trace_wait",
    "timing_s/log_probs",
    "timing_s/old_log_prob",
    "timing_s/native_log_prob",
    "timing_s/older_log_prob",
    "timing_s/ref",
    "timing_s/values",
    "timing_s/adv",
    "timing_s/update_critic",
    "timing_s/update_actor",
)
_MEMORY = (
    "perf/max_memory_allocated_gb",
    "perf/max_memory_reserved_gb",
    "perf/max_resident_gb",
    "perf/cpu_memory_used_gb",
)


def _largest(names: Sequence[str], of_ranks: Sequence[Mapping[str, float]]) -> Metrics:
    """Return the largest value of any rank for each name; None if no rank has a value."""
    return {
        name: max((found[name] for found in of_ranks if name in found), default=None)
        for name in names
    }


def _advantage_metrics(of_ranks: Sequence[Spread | None]) -> Metrics:
    name, spreads = "critic/advantages", [spread for spread in of_ranks if spread is not None]
    if not spreads:
        return {f"{name}/mean": None, f"{name}/max": None, f"{name}/min": None}
    total = sum(spread.total for spread in spreads)
    return {
        f"{name}/mean": total / sum(spread.count for spread in spreads),
        f"{name}/max": max(spread.largest for spread in spreads),
        f"{name}/min": min(spread.least for spread in spreads),
    }


def _share(reasons: Counter[str], reason: str) -> float | None:
    return reasons[reason] / reasons.total() if reasons else None


def reward_kl_of(reports: Sequence[RankReport]) -> StepKl | None:
    """Return the KL in the reward, if any; all last-stage ranks report the same KL."""
    return next((report.reward_kl for report in reports if report.reward_kl is not None), None)


def reward_kl_metrics(kl: StepKl | None, coefficient: float) -> Metrics:
    """Return the metrics of the KL in the reward, under verl's names."""
    return {
        "actor/reward_kl_penalty": None if kl is None else kl.mean,
        "actor/reward_kl_penalty_coeff": None if kl is None else coefficient,
    }


def replay_metrics(counts: Counts) -> Metrics:
    """Return the replay metrics.

    Rows are counted in one layer, because every layer has the same rows (`check_passes`).
    """
    if not counts:
        names = ("coverage", "agreement", "rows", "rows_native", "rows_padding", "layers")
        return {f"replay/{name}": None for name in names}
    one = next(iter(counts.values()))
    agreeing = sum(count.agreeing for count in counts.values())
    return {
        "replay/coverage": one.replayed / (one.replayed + one.native),
        "replay/agreement": agreeing / sum(count.replayed for count in counts.values()),
        "replay/rows": one.replayed,
        "replay/rows_native": one.native,
        "replay/rows_padding": one.padding,
        "replay/layers": len(counts),
        **by_layer("replay/agreement", {n: c.agreeing / c.replayed for n, c in counts.items()}),
    }


def _mini_batches(reports: Sequence[RankReport]) -> list[Sums]:
    """Return sums over ranks, per mini-batch.

    A number that a user's loss does not report on some rank counts as 0 there.
    """
    parts = [report.updates for report in reports if report.updates]
    return [
        {
            name: sum(sums.get(name, 0.0) for sums in of_ranks)
            for name in {name: None for sums in of_ranks for name in sums}
        }
        for of_ranks in zip(*parts, strict=True)
    ]
