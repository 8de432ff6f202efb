"""One step of a training rank, from a sealed manifest to the metrics; it writes nothing.

read own share ─► old log-probs ─────────────► [reference log-probs] ─► updates ─► reports
                  disabled: native              native                  native
                  R2: native, recorded ──routes──────────────────────► replayed
                  R3: replayed ◄──routes of the engine───────────────► replayed
                  (R3, every native_every steps: once more, native, to see the mismatch)
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from operators.training.batches.step_data import StepData, valid_rows
from operators.training.passes.logprob_pass import (
    LogProbs,
    native_pass,
    recording_pass,
    replaying_pass,
)
from operators.training.passes.update import Compared, update
from operators.training.rank import Rank
from operators.training.replay.counts import Counts, check_passes
from operators.training.step_metrics import (
    Metrics,
    RankReport,
    finish_reasons_of,
    gather,
    mismatch_of,
    total_counts,
    training_metrics,
)
from pipeline import progress
from pipeline.rl.mismatch import Mismatch
from pipeline.traces.format.types import Routes


@dataclass(frozen=True)
class Trained:
    """The results of a trained step."""

    metrics: Metrics
    """Equal on all ranks."""
    counts: Counts
    """Counts of the first replaying pass, by layer, over all ranks."""
    recorded: Mapping[str, Routes] | None
    """R2: the routes that this rank's log-prob pass recorded, to be stored."""


def train_step(rank: Rank, data: StepData, waited_s: float) -> Trained:
    """Train on a sealed step; `waited_s` is how long the rank has waited for its data.

    Raises ReplayError, UpdateError, TraceError, StoreError.
    """
    replay = rank.config.actor_rollout_ref.actor.router_replay
    started = time.monotonic()
    routes: Mapping[str, Routes] | None = data.routes
    recorded, native = None, None
    _say(data, "log-probs")
    if replay.records_routes:
        logprob_pass = recording_pass(rank, data)
        routes = recorded = logprob_pass.routes
    elif routes is not None:
        logprob_pass = replaying_pass(rank, data, routes)
        if _measures_native(rank, data.step):
            _say(data, "log-probs with native routing")
            native = native_pass(rank, data, rank.chunks).logprobs
    else:
        logprob_pass = native_pass(rank, data, rank.chunks)
    if routes is None or recorded is not None:
        native = logprob_pass.logprobs  # the pass was native
    reference = None
    if rank.reference is not None:
        _say(data, "log-probs of the reference")
        reference = native_pass(rank, data, rank.reference).logprobs
    forward_s = time.monotonic() - started

    started = time.monotonic()
    updates = update(rank, data, Compared(logprob_pass.logprobs, reference), routes)
    update_s = time.monotonic() - started

    position = rank.position
    passes: dict[str, Counts] = {}
    if routes is not None:
        if recorded is None:
            passes["log-prob pass"] = logprob_pass.counts
        passes |= {f"update epoch {epoch}": counts for epoch, counts in enumerate(updates.counts)}
    reports = gather(
        RankReport(
            mismatch=_mismatch(rank, data, logprob_pass.logprobs),
            mismatch_native=None if native is None else _mismatch(rank, data, native),
            updates=updates.sums if position.speaks_for_tokens else (),
            counts=passes if position.speaks_for_rows else {},
            times_s={
                "time/trace_wait_s": waited_s + data.wait_s,
                "time/logprob_s": forward_s,
                "time/update_s": update_s,
            },
            fetched_bytes=None if data.routes is None else data.routes.fetched_bytes,
            finish_reasons=finish_reasons_of(data) if position.speaks_for_tokens else {},
        )
    )
    of_passes = total_counts(reports)
    if replay.replays_recorded or replay.records_routes:
        _check(rank, data, of_passes)
    first = next(iter(of_passes.values()), {})
    metrics = training_metrics(reports, first, updates.grad_norms) | {"lr": updates.lr}
    return Trained(metrics, first, recorded)


def _check(rank: Rank, data: StepData, of_passes: Mapping[str, Counts]) -> None:
    """Raise ReplayError unless every pass has used all recorded rows."""
    valid, rows = valid_rows(data.columns)
    records = rank.config.actor_rollout_ref.actor.router_replay.records_routes
    valid = rows if records else valid
    check_passes(data.step, of_passes, rank.routers, valid, rows)


def _say(data: StepData, what: str) -> None:
    progress.say(f"step {data.step}: {what}", len(data.layout.epoch(0)), "mini-batches")


def _measures_native(rank: Rank, step: int) -> bool:
    every = rank.config.actor_rollout_ref.actor.router_replay.native_every
    return every > 0 and step % every == 0


def _mismatch(rank: Rank, data: StepData, logprobs: LogProbs) -> Mismatch | None:
    return mismatch_of(data, logprobs) if rank.position.speaks_for_tokens else None
