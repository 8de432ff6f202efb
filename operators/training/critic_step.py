"""The critic's part of a step: its value pass, its updates and its metrics.

values ─► advantages, returns ─► the critic's updates ─► the policy's, after trainer.critic_warmup

Dimensions: T is the number of this rank's response tokens that the loss includes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from operators.training.batches.step_data import StepData
from operators.training.passes.compared import Compared
from operators.training.passes.critic_passes import update_critic, values_pass
from operators.training.passes.flat import BySample
from operators.training.passes.update import Updates
from operators.training.rank import Rank, TrainedCritic
from operators.training.replay.counts import Counts, LayerCounts
from pipeline import progress
from pipeline.rl.moments import EMPTY, Moments, moments
from pipeline.traces.format.types import Routes

Routing = Mapping[str, Routes]
PASS = "critic: "
"""The prefix of the critic's passes in the replay counts."""


@dataclass(frozen=True)
class CriticReport:
    """One rank's numbers for the critic in a step, excluding what another rank reports."""

    updates: Sequence[dict[str, float]] = ()
    """Sums over tokens, per mini-batch."""
    values: Moments = EMPTY
    returns: Moments = EMPTY
    errors: Moments = EMPTY
    """Moments of returns minus values."""


@dataclass(frozen=True)
class CriticStep:
    """The results of the critic's part of a step on this rank."""

    report: CriticReport
    updates: Updates
    counts: dict[str, Counts]
    """Replay counts, keyed by pass; empty with native routing."""


def sweep_values(
    rank: Rank, critic: TrainedCritic, data: StepData, routes: Routing | None
) -> tuple[BySample, Counts]:
    """Compute the values of the step's response tokens.

    Args:
        rank: This training rank.
        critic: The critic on this rank.
        data: This rank's data for the step.
        routes: Routes that the actor replays, keyed by sample id. They are used only if
            critic.replay_routes is set.

    Returns:
        Values, float32 [G] per sample, and the replay counts for this pass.
    """
    progress.say(f"step {data.step}: values", len(data.layout.epoch(0)), "mini-batches")
    with rank.offload.of_values():
        found = values_pass(rank, critic, data, routes_of(rank, routes))
    return found.values, found.counts


def train_critic(
    rank: Rank,
    critic: TrainedCritic,
    data: StepData,
    compared: Compared,
    sweep: tuple[Counts, Routing | None],
) -> CriticStep:
    """Update the critic, and report the critic's part of the step.

    Args:
        rank: This training rank.
        critic: The critic on this rank.
        data: This rank's data for the step.
        compared: Masks, values and returns of the step's response tokens.
        sweep: Replay counts of the value pass, and the step's routes (None for native routing).
    """
    counts, routes = sweep
    with rank.offload.of_critic():
        updates = update_critic(rank, critic, data, compared, routes_of(rank, routes))
    passes: dict[str, Counts] = {}
    if routes_of(rank, routes) is not None:
        passes = {f"{PASS}values": counts}
        passes |= {f"{PASS}epoch {i}": of_epoch for i, of_epoch in enumerate(updates.counts)}
    position = rank.position
    spreads = _spreads(compared) if position.speaks_for_samples else {}
    return CriticStep(
        CriticReport(updates.sums if position.speaks_for_tokens else (), **spreads),
        updates,
        passes,
    )


def routes_of(rank: Rank, routes: Routing | None) -> Routing | None:
    """Return the routes that the critic replays; None selects native routing."""
    return routes if rank.config.critic.replay_routes else None


def _spreads(compared: Compared) -> dict[str, Moments]:
    values_T, returns_T = (
        _counted(of_tokens or {}, compared.mask)
        for of_tokens in (compared.values, compared.returns)
    )
    return {
        "values": moments(values_T),
        "returns": moments(returns_T),
        "errors": moments(returns_T - values_T),
    }


def _counted(values: BySample, mask: BySample) -> npt.NDArray[np.float64]:
    parts = [values[id][mask[id]] for id in sorted(mask)]
    return np.concatenate([np.empty(0), *parts])


def critic_metrics(
    reports: Sequence[CriticReport | None], step: CriticStep, counts: Mapping[str, Counts]
) -> dict[str, float | None]:
    """Return a step's critic metrics, under verl's names.

    vf_explained_var is 1 - var(returns - values) / (var(returns) + 1e-5). The values were computed
    before the step's updates.

    Args:
        reports: The reports of all ranks; None for ranks without a report.
        step: This rank's results.
        counts: Replay counts over all ranks, keyed by pass.
    """
    found, updates = [report for report in reports if report is not None], step.updates
    values, returns, errors = (
        sum((getattr(report, name) for report in found), start=EMPTY)
        for name in ("values", "returns", "errors")
    )
    explained = None
    if errors.variance is not None and returns.variance is not None:
        explained = 1.0 - errors.variance / (returns.variance + 1e-5)
    mini_batches = [
        {name: sum(sums[name] for sums in of_ranks) for name in of_ranks[0]}
        for of_ranks in zip(*(report.updates for report in found if report.updates), strict=True)
    ]

    def mean(name: str, over: str) -> float | None:
        means = [sums[name] / max(sums[over], 1) for sums in mini_batches]
        return float(np.mean(means)) if means else None

    return {
        "critic/vf_loss": mean("vf_loss", "divisor"),
        "critic/vf_clipfrac": mean("vf_clipped", "tokens"),
        "critic/vpred_mean": mean("vpred", "tokens"),
        "critic/vf_explained_var": explained,
        **_of_moments("critic/values", values),
        **_of_moments("critic/returns", returns),
        "critic/grad_norm": float(np.mean(updates.grad_norms)) if updates.grad_norms else None,
        "critic/lr": updates.lr,
        "critic/skipped": updates.skipped,
        "critic/skipped_empty": updates.empty,
        **_replay_metrics(counts),
    }


def _of_moments(name: str, found: Moments) -> dict[str, float | None]:
    return {
        f"{name}/mean": found.mean,
        f"{name}/max": found.largest,
        f"{name}/min": found.smallest,
    }


def _replay_metrics(counts: Mapping[str, Counts]) -> dict[str, float | None]:
    """Return the critic's replay coverage (0 with native routing) and agreement."""
    first = next((of for name, of in counts.items() if name.startswith(PASS)), {})
    total = sum(first.values(), start=LayerCounts())
    rows = total.replayed + total.native
    return {
        "critic/replay/coverage": total.replayed / rows if rows else 0.0,
        "critic/replay/agreement": total.agreeing / total.replayed if total.replayed else None,
    }
