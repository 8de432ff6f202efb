"""The step's metrics: the report of each rank, and the numbers computed from all reports.

The value of a key that was not measured is None; the key is never absent. The keys are described in
pipeline/metrics/table.py.
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
from operators.training.replay.counts import Counts, LayerCounts, added
from pipeline.rl.corrections.tally import Tally
from pipeline.rl.estimators.reward_kl import StepKl
from pipeline.rl.mismatch import Mismatch, mismatch, total_mismatch
from pipeline.traces.format.shard_rows import BASELINE

Metrics = dict[str, float | None]
Sums = dict[str, float]


@dataclass(frozen=True)
class Spread:
    """Numbers of tokens, so that ranks can add theirs. Example: Spread(512, 0.25, -1.5, 2.0)."""

    count: int
    total: float
    least: float
    largest: float


def spread_of(parts: Iterable[npt.NDArray[np.float32]]) -> Spread | None:
    """The spread of all numbers; None: there are none."""
    values_T = np.concatenate([np.zeros(0, np.float32), *parts])
    if not len(values_T):
        return None
    total = float(values_T.sum(dtype=np.float64))
    return Spread(len(values_T), total, float(values_T.min()), float(values_T.max()))


@dataclass(frozen=True)
class RankReport:
    """One rank's part. Numbers that another rank reports too are left out."""

    mismatch: Mismatch | None = None
    mismatch_native: Mismatch | None = None
    """None: not measured, or reported by another rank."""
    updates: Sequence[Sums] = ()
    """Per mini-batch: sums over tokens, with their number as `tokens` and the loss's `divisor`."""
    reward_kl: StepKl | None = None
    """Of the whole step; None: no KL is in the reward, or off the last stage."""
    critic: CriticReport | None = None
    """None: there is no critic."""
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """Counts of replay, by name of the pass; every pass covers the whole step."""
    times_s: Sums = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    """GiB, by metric."""
    fetched_bytes: int | None = None
    """Bytes of recorded routes fetched from the store; None: none are read."""
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    """Samples by why generation ended."""
    without_loss: int = 0
    """Samples that are not trained on, because of how generation ended."""
    advantages: Spread | None = None
    """Of tokens that count; None: there are none, or another rank reports them."""
    corrections: Tally | None = None
    """What the corrections found; None: reported by another rank."""


def mismatch_of(data: StepData, logprobs: LogProbs) -> Mismatch:
    """Compare this rank's log-probs with the engine's, over response tokens that count."""
    total = Mismatch(0, 0.0, 0)
    for id in sorted(logprobs):
        sample = data.samples[id]
        mask_G = sample.loss_mask_G
        total += mismatch(logprobs[id][mask_G], sample.logprobs_G[mask_G])
    return total


def finish_reasons_of(data: StepData) -> Counter[str]:
    """This data-parallel rank's samples, but greedy baselines, by why generation ended."""
    marks = data.manifest.rows["not_trained"].to_pylist()
    ids = (id for id, mark in zip(data.manifest.ids, marks, strict=True) if mark != BASELINE)
    return Counter(data.samples[id].finish_reason for id in ids)


def total_counts(reports: Sequence[RankReport]) -> dict[str, Counts]:
    """Counts of replay, by pass (in their order) and layer, over all ranks."""
    names = dict.fromkeys(name for report in reports for name in report.counts)
    return {name: added(r.counts[name] for r in reports if name in r.counts) for name in names}


def total_tally(reports: Sequence[RankReport]) -> Tally:
    """What the corrections found, over all ranks."""
    parts = (report.corrections for report in reports)
    return sum((part for part in parts if part is not None), start=Tally())


def training_metrics(
    reports: Sequence[RankReport], counts: Counts, grad_norms: Sequence[float]
) -> Metrics:
    """Losses (mean over mini-batches), mismatch, replay, times.

    `counts` are those of one replaying pass over all ranks; {} if nothing was replayed. Times are
    those of the slowest rank, memory that of the fullest.
    """
    mini_batches = _mini_batches(reports)

    def mean(name: str, over: str = "tokens") -> float | None:
        means = [sums[name] / max(sums[over], 1) for sums in mini_batches if name in sums]
        return float(np.mean(means)) if means else None

    log_ratio = mean("log_ratio")
    replayed = total_mismatch(report.mismatch for report in reports)
    native = total_mismatch(report.mismatch_native for report in reports)
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
        "mismatch/kl": None if replayed is None else replayed.kl,
        "mismatch/extreme_share": None if replayed is None else replayed.extreme_share,
        "mismatch/kl_native": None if native is None else native.kl,
        "mismatch/extreme_share_native": None if native is None else native.extreme_share,
        **{f"policy_loss/{name}": mean(name) for name in _of_users(mini_batches)},
        **replay_metrics(counts),
        "replay/bytes_fetched": sum(fetched) if fetched else None,
        **_largest(_TIMES, [report.times_s for report in reports]),
        **_largest(_MEMORY, [report.memory for report in reports]),
    }


def _of_users(mini_batches: Sequence[Sums]) -> list[str]:
    """The names that a user's loss reports beside those of the built-in ones."""
    named = {name for sums in mini_batches for name in sums}
    return sorted(named - OWN_REPORTS - {"clipped", "dual_clipped", "log_ratio"})


_TIMES = (
    "timing_s/trace_wait",
    "timing_s/log_probs",
    "timing_s/old_log_prob",
    "timing_s/native_log_prob",
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
    """The largest number of any rank, by name; None: no rank has one."""
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
    """The KL in the reward, which all ranks of the last stage report alike; None: there is none."""
    return next((report.reward_kl for report in reports if report.reward_kl is not None), None)


def reward_kl_metrics(kl: StepKl | None, coefficient: float) -> Metrics:
    """Metrics of the KL in the reward, by verl's names."""
    return {
        "actor/reward_kl_penalty": None if kl is None else kl.mean,
        "actor/reward_kl_penalty_coeff": None if kl is None else coefficient,
    }


def replay_metrics(counts: Counts) -> Metrics:
    """Metrics of replay; rows are counted once, as every layer has the same (check_passes)."""
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
    }


def agreement_by_layer(counts: Counts) -> dict[str, float] | None:
    """The share of replayed rows where the router's own choice is the recorded one."""

    def share(count: LayerCounts) -> float:
        return count.agreeing / count.replayed

    return {str(layer): share(counts[layer]) for layer in sorted(counts)} or None


def _mini_batches(reports: Sequence[RankReport]) -> list[Sums]:
    """Sums over ranks, by mini-batch; what a user's loss reports now and then is 0 elsewhere."""
    parts = [report.updates for report in reports if report.updates]
    return [
        {
            name: sum(sums.get(name, 0.0) for sums in of_ranks)
            for name in {name: None for sums in of_ranks for name in sums}
        }
        for of_ranks in zip(*parts, strict=True)
    ]
