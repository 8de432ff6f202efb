"""The critic's part of a step: values in the sweep, its updates, and its metrics.

values ─► advantages, returns ─► the critic's updates ─► the policy's, after trainer.critic_warmup

Letters: T response tokens that count, of this rank's samples.
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
"""How the names of the critic's passes begin among the counts of replay."""


@dataclass(frozen=True)
class CriticReport:
    """One rank's part of a step's critic. Numbers that another rank reports too are left out."""

    updates: Sequence[dict[str, float]] = ()
    """Per mini-batch: sums over tokens."""
    values: Moments = EMPTY
    returns: Moments = EMPTY
    errors: Moments = EMPTY
    """Of returns minus values."""


@dataclass(frozen=True)
class CriticStep:
    """The results of the critic's part of a step on this rank."""

    report: CriticReport
    updates: Updates
    counts: dict[str, Counts]
    """Counts of replay by pass; empty with native routing."""


def sweep_values(
    rank: Rank, critic: TrainedCritic, data: StepData, routes: Routing | None
) -> tuple[BySample, Counts]:
    """The values of the step's response tokens, with the routes that the actor replays if the
    settings say so, and the counts of that replay."""
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
    """Update the critic; `sweep`: the counts of the values' pass, and the routes of the step."""
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
    """The routes that the critic replays; None: its routers choose."""
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
    """The metrics of a step's critic, by verl's names.

    `reports` are those of all ranks, `counts` those of replay by pass. vf_explained_var is
    1 - var(returns - values) / (var(returns) + 1e-5), with the values of the step's start.
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
    """Which routing the critic used: the share of rows with the actor's routes, 0 with its own."""
    first = next((of for name, of in counts.items() if name.startswith(PASS)), {})
    total = sum(first.values(), start=LayerCounts())
    rows = total.replayed + total.native
    return {
        "critic/replay/coverage": total.replayed / rows if rows else 0.0,
        "critic/replay/agreement": total.agreeing / total.replayed if total.replayed else None,
    }
