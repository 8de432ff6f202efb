"""One step of a training rank: from a sealed manifest to the numbers; nothing is written here.

read own share ─► old log-probs ─────────────► [reference log-probs] ─► updates ─► reports
                  disabled: native              native                  native
                  R2: native, recorded ──routes──────────────────────► replayed
                  R3: replayed ◄──routes of the engine───────────────► replayed
                  (R3, every native_every steps: once more, native, to see the mismatch)
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from operators.training.counts import Counts, check_counts
from operators.training.data import StepData, records, replays_recorded, valid_rows
from operators.training.metrics import (
    Metrics,
    RankReport,
    gather,
    mismatch_of,
    total_counts,
    training_metrics,
)
from operators.training.rank import Rank
from operators.training.sweep import LogProbs, native_sweep, recording_sweep, replaying_sweep
from operators.training.update import Compared, update
from pipeline.rl.metrics import Mismatch
from pipeline.traces.records import Routes


@dataclass(frozen=True)
class Trained:
    """What a step did."""

    metrics: Metrics
    """Equal on all ranks."""
    counts: Counts
    """What the first replaying pass replayed, by layer, over all ranks."""
    recorded: Mapping[str, Routes] | None
    """R2: the routes that this rank's log-prob pass recorded, to be stored."""


def train_step(rank: Rank, data: StepData, waited_s: float) -> Trained:
    """Train on a sealed step, which the trainer has waited for so long since it was sealed.

    Raises ReplayError, UpdateError, TraceError, StoreError.
    """
    config = rank.config
    started = time.monotonic()
    routes, recorded, native = data.routes, None, None
    if records(config):
        swept = recording_sweep(rank, data)
        routes = recorded = swept.routes
    elif routes is not None:
        swept = replaying_sweep(rank, data, routes)
        if _measures_native(rank, data.step):
            native = native_sweep(rank, data, rank.chunks).logprobs
    else:
        swept = native_sweep(rank, data, rank.chunks)
    if routes is None or recorded is not None:
        native = swept.logprobs  # the pass was native
    reference = None
    if rank.reference is not None:
        reference = native_sweep(rank, data, rank.reference).logprobs
    forward_s = time.monotonic() - started

    started = time.monotonic()
    updates = update(rank, data, Compared(swept.logprobs, reference), routes)
    update_s = time.monotonic() - started

    place = rank.place
    passes: dict[str, Counts] = {}
    if routes is not None:
        if recorded is None:
            passes["log-prob pass"] = swept.counts
        passes |= {f"update epoch {epoch}": counts for epoch, counts in enumerate(updates.counts)}
    reports = gather(
        RankReport(
            mismatch=_mismatch(rank, data, swept.logprobs),
            mismatch_native=None if native is None else _mismatch(rank, data, native),
            updates=updates.sums if place.speaks_for_tokens else (),
            counts=passes if place.speaks_for_rows else {},
            times_s={
                "time/trace_wait_s": waited_s + data.wait_s,
                "time/logprob_s": forward_s,
                "time/update_s": update_s,
            },
            fetched_bytes=None if data.routes is None else data.routes.fetched_bytes,
        )
    )
    of_passes = total_counts(reports)
    if replays_recorded(config) or records(config):
        valid, rows = valid_rows(data.columns)
        valid = rows if records(config) else valid
        # Each pass: one may replay and another not. None at all is one that did nothing.
        for name, counts in (of_passes or {"no pass": {}}).items():
            check_counts(f"step {data.step}, {name}", counts, rank.routers, valid, rows)
    first = next(iter(of_passes.values()), {})
    metrics = training_metrics(reports, first, updates.grad_norms)
    return Trained(metrics, first, recorded)


def _measures_native(rank: Rank, step: int) -> bool:
    every = rank.config.actor_rollout_ref.actor.router_replay.native_every
    return every > 0 and step % every == 0


def _mismatch(rank: Rank, data: StepData, logprobs: LogProbs) -> Mismatch | None:
    return mismatch_of(data, logprobs) if rank.place.speaks_for_tokens else None
