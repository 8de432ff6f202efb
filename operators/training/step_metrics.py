"""The step's metrics: what each rank reports, and the numbers computed from all reports.

A metric that was not measured has the value None; its key is still present.
pipeline/metrics/table.py describes the keys.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from operators.training.batches.step_data import StepData, without_loss
from operators.training.measured import Measured, Measurements, mean, spread
from operators.training.passes.compared import Compared
from operators.training.passes.custom_loss import OWN_REPORTS
from operators.training.passes.flat import BySample
from operators.training.passes.logprob_pass import LogProbs
from operators.training.passes.update import Updates
from operators.training.replay.counts import Counts, LayerCounts, added
from pipeline.config.tree import RunConfig
from pipeline.metrics.metric import Metrics, by_layer
from pipeline.rl.kl import StepKl
from pipeline.rl.mismatch import Mismatch, mismatch
from pipeline.rl.moments import EMPTY, Moments, Tally, moments
from pipeline.traces.format.manifest import BASELINE

Sums = dict[str, float]
CRITIC = "critic: "
"""The prefix of the critic's passes in the replay counts."""


@dataclass(frozen=True)
class RankReport:
    """One rank's numbers for a step, excluding what another rank reports."""

    measured: Measurements = field(default_factory=dict)
    updates: Sequence[Sums] = ()
    """Sums over tokens, per mini-batch of the policy, including the number of `tokens` and the
    loss's `divisor`. They are not in `measured`, because a number that a user's loss reports on
    some ranks is divided by the tokens of all ranks."""
    critic_updates: Sequence[Sums] = ()
    """The same sums for the critic."""
    counts: Mapping[str, Counts] = field(default_factory=dict)
    """Replay counts, keyed by the pass's name; every pass covers the entire step."""
    corrections: Tally = field(default_factory=Tally)
    reward_kl: StepKl | None = None
    """KL of the step over all ranks; None on earlier stages, and if the reward contains no KL."""


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


def measured_mismatch(
    data: StepData, trained: LogProbs | None, native: LogProbs | None, older: LogProbs | None
) -> Measurements:
    """Return the mismatch of this rank's samples; None stands for log-probs that are not known.

    Args:
        data: This rank's data for the step.
        trained: Log-probs with the same routing as the updates.
        native: Log-probs with native routing.
        older: Log-probs with native routing and the weights of the samples' version.
    """

    def distance(logprobs: LogProbs | None, sampled: LogProbs | None = None) -> Mismatch:
        return Mismatch(0, 0.0, 0) if logprobs is None else mismatch_of(data, logprobs, sampled)

    distances = {
        "": distance(trained),
        "_native": distance(native),
        "_engine": distance(older),
        "_staleness": distance(None if older is None else native, older),
    }
    found = {}
    for name, of in distances.items():
        found[f"mismatch/kl{name}"] = mean(of.kl_sum, of.tokens)
        found[f"mismatch/extreme_share{name}"] = mean(of.extreme, of.tokens)
    return found


def finish_reasons_of(data: StepData) -> Counter[str]:
    """Count this data-parallel rank's samples by finish reason, excluding greedy baselines."""
    marks = data.manifest.rows["not_trained"].to_pylist()
    ids = (id for id, mark in zip(data.manifest.ids, marks, strict=True) if mark != BASELINE)
    return Counter(data.samples[id].finish_reason for id in ids)


def measured_finish_reasons(reasons: Counter[str], config: RunConfig) -> Measurements:
    """Return the shares of incomplete samples, and the number of samples that have no loss.

    Args:
        reasons: Number of this data-parallel rank's samples for each finish reason.
        config: The run's settings.
    """
    return {
        "response_length/clip_ratio": mean(reasons["length"], reasons.total()),
        "response/aborted_ratio": mean(reasons["abort"], reasons.total()),
        "response/masked": Measured(sum, sum(reasons[reason] for reason in without_loss(config))),
    }


def measured_advantages(compared: Compared) -> Measurements:
    """Return the spread of the advantages of this rank's tokens in the loss."""
    of_tokens = compared.advantages
    return spread("critic/advantages", _in_loss(of_tokens, compared.mask, of_tokens))


def measured_values(compared: Compared) -> Measurements:
    """Return the spread of the critic's values and returns, before the updates.

    vf_explained_var is 1 - var(returns - values) / (var(returns) + 1e-5).
    """
    mask = compared.mask
    values_T, returns_T = (
        _in_loss(of_tokens or {}, mask, sorted(mask)).astype(np.float64)
        for of_tokens in (compared.values, compared.returns)
    )
    both = moments(returns_T - values_T), moments(returns_T)
    return {
        "critic/vf_explained_var": Measured(_explained, both),
        **spread("critic/values", values_T),
        **spread("critic/returns", returns_T),
    }


def _explained(of_ranks: Sequence[tuple[Moments, Moments]]) -> float | None:
    errors, returns = (sum(parts, start=EMPTY) for parts in zip(*of_ranks, strict=True))
    if errors.variance is None or returns.variance is None:
        return None
    return 1.0 - errors.variance / (returns.variance + 1e-5)


def _in_loss(values: BySample, mask: BySample, ids: Iterable[str]) -> npt.NDArray[np.float32]:
    """Return the values of the samples' tokens that the loss includes, float32 [T]."""
    return np.concatenate([np.empty(0, np.float32), *(values[id][mask[id]] for id in ids)])


def total_counts(reports: Sequence[RankReport]) -> dict[str, Counts]:
    """Add up all ranks' replay counts, for each pass (in the order of passes) and each layer."""
    names = dict.fromkeys(name for report in reports for name in report.counts)
    return {name: added(r.counts[name] for r in reports if name in r.counts) for name in names}


def policy_metrics(of_ranks: Iterable[Sequence[Sums]], updates: Updates) -> Metrics:
    """Return the metrics of the policy's updates. Losses are means over mini-batches.

    Args:
        of_ranks: The sums of all ranks, per mini-batch; empty for ranks that report none.
        updates: This rank's results.
    """
    mini_batches = _mini_batches(of_ranks)
    log_ratio = _mean(mini_batches, "log_ratio")
    return {
        "actor/pg_loss": _mean(mini_batches, "policy", "divisor"),
        "actor/kl_loss": _mean(mini_batches, "kl", "divisor"),
        "actor/entropy": _mean(mini_batches, "entropy"),
        "actor/pg_clipfrac": _mean(mini_batches, "clipped"),
        "actor/pg_clipfrac_lower": _mean(mini_batches, "dual_clipped"),
        "actor/ppo_kl": None if log_ratio is None else 0.0 - log_ratio,
        "actor/tokens": sum(sums["tokens"] for sums in mini_batches),
        **{f"policy_loss/{name}": _mean(mini_batches, name) for name in _of_users(mini_batches)},
        **_of_optimizer("actor", "update", updates),
    }


def critic_metrics(
    of_ranks: Iterable[Sequence[Sums]], updates: Updates, passes: Mapping[str, Counts]
) -> Metrics:
    """Return the metrics of the critic's updates and of its first pass with replay.

    Without replay, the coverage is 0.

    Args:
        of_ranks: The sums of all ranks, per mini-batch; empty for ranks that report none.
        updates: This rank's results.
        passes: Replay counts over all ranks, keyed by pass.
    """
    mini_batches = _mini_batches(of_ranks)
    total = sum(_first(passes, of_critic=True).values(), start=LayerCounts())
    rows = total.replayed + total.native
    return {
        "critic/vf_loss": _mean(mini_batches, "vf_loss", "divisor"),
        "critic/vf_clipfrac": _mean(mini_batches, "vf_clipped"),
        "critic/vpred_mean": _mean(mini_batches, "vpred"),
        **_of_optimizer("critic", "critic", updates),
        "critic/replay/coverage": total.replayed / rows if rows else 0.0,
        "critic/replay/agreement": total.agreeing / total.replayed if total.replayed else None,
    }


def _mini_batches(of_ranks: Iterable[Sequence[Sums]]) -> list[Sums]:
    """Return sums over ranks, per mini-batch.

    A number that a user's loss does not report on some rank counts as 0 there.
    """
    reporting = (of_rank for of_rank in of_ranks if of_rank)
    return [added(of_mini_batch) for of_mini_batch in zip(*reporting, strict=True)]


def _mean(mini_batches: Sequence[Sums], name: str, over: str = "tokens") -> float | None:
    """Return the mean, over mini-batches, of a sum divided by the sum named `over`."""
    means = [sums[name] / max(sums[over], 1) for sums in mini_batches if name in sums]
    return float(np.mean(means)) if means else None


def _of_users(mini_batches: Sequence[Sums]) -> list[str]:
    """Return the names that a user's loss reports in addition to the built-in ones."""
    named = {name for sums in mini_batches for name in sums}
    return sorted(named - OWN_REPORTS - {"clipped", "dual_clipped", "log_ratio"})


def _of_optimizer(model: str, prefix: str, updates: Updates) -> Metrics:
    norms = updates.grad_norms
    return {
        f"{model}/grad_norm": float(np.mean(norms)) if norms else None,
        f"{model}/lr": updates.lr,
        f"{prefix}/skipped": updates.skipped,
        f"{prefix}/skipped_empty": updates.empty,
    }


def replay_metrics(passes: Mapping[str, Counts]) -> Metrics:
    """Return the replay metrics of the policy's first pass with replay; None if there is none.

    Rows are counted in one layer, because every layer has the same rows (`check_passes`).

    Args:
        passes: Replay counts over all ranks, keyed by pass.
    """
    counts = _first(passes, of_critic=False)
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


def _first(passes: Mapping[str, Counts], of_critic: bool) -> Counts:
    """Return the counts of the first pass of the critic or of the policy; {} if there is none."""
    return next((of for name, of in passes.items() if name.startswith(CRITIC) == of_critic), {})
