"""One step of a training rank, from a sealed manifest to the metrics. This module writes nothing.

read own share ─► old log-probs ─► [reference] ─► [values] ─► advantages ─► updates ─► reports

Routing in each mode of router_replay; the reference always routes natively:

    disabled   all passes are native
    R2         the log-prob pass is native and records its routes; the updates replay them
    R3         the log-prob pass and the updates replay the engine's routes

The critic's passes replay the same routes as the updates if critic.replay_routes is set. With
recorded routes (R3, replay_file), a second, native log-prob pass runs in the first step of an
attempt, once every native_every steps, and in steps whose KL with replay is suspiciously high. With
bypass_mode, the engine's log-probs are used. The trained model's log-prob passes then run only with
recorded routes, and only in the steps that also have the second, native pass. Recorded routes that
do not fit the model raise ReplayError on all ranks.

With max_staleness=1, another native pass runs once every native_every steps, with the weights of
the version that generated the step's samples. The previous step kept a copy of these weights on the
host.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from operators.training.agree import await_ranks, gathered
from operators.training.batches.step_data import StepData, valid_rows
from operators.training.errors import ReplayError
from operators.training.measured import Measured, reduced
from operators.training.passes.compared import Compared, compare
from operators.training.passes.critic_passes import ValuePass, update_critic, values_pass
from operators.training.passes.logprob_pass import (
    LogProbPass,
    LogProbs,
    native_pass,
    recording_pass,
    replaying_pass,
)
from operators.training.passes.update import Updates, update
from operators.training.rank import Rank
from operators.training.replay.counts import Counts, check_passes
from operators.training.replay.health import NOT_REPLAYED, Evidence, Health, judge, kl_too_high
from operators.training.speed import TIMES, memory_peaks, timed
from operators.training.step_metrics import (
    CRITIC,
    RankReport,
    critic_metrics,
    finish_reasons_of,
    measured_advantages,
    measured_finish_reasons,
    measured_mismatch,
    measured_values,
    mismatch_of,
    policy_metrics,
    replay_metrics,
    total_counts,
)
from pipeline import progress
from pipeline.config.tree import RunConfig
from pipeline.metrics.metric import Metrics
from pipeline.rl.corrections.report import correction_metrics
from pipeline.rl.kl import next_coefficient
from pipeline.rl.mismatch import Mismatch, total_mismatch
from pipeline.rl.moments import Tally
from pipeline.traces.format.types import Routes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """The results of a trained step."""

    metrics: Metrics
    """Metrics of the step, the same on all ranks."""
    recorded: Mapping[str, Routes] | None
    """R2: the routes that this rank's log-prob pass recorded, to be stored."""
    next_kl_coef: float | None = None
    """Weight of the KL penalty in the next step's reward, the same on all ranks; None if the reward
    contains no KL penalty."""


@dataclass(frozen=True)
class _Sweeps:
    """The results of the log-prob passes on this rank."""

    trained: LogProbPass | None
    """The pass that uses the same routing as the updates; with R2, it records this routing. None if
    bypass_mode omits the pass."""
    native: LogProbs | None
    """Log-probs with native routing; None if not measured."""
    older: LogProbs | None
    """Log-probs with native routing and the weights of the samples' version; None if not measured.
    """
    reference: LogProbs | None
    """Log-probs of the reference; None if the run has no reference."""
    values: ValuePass | None
    """Values of the critic, and their replay counts; None if the run has no critic."""
    routes: Mapping[str, Routes] | None
    """Routes that the updates replay; None for native routing."""
    recorded: Mapping[str, Routes] | None
    """R2: the routes that the log-prob pass recorded; None in other modes."""


def train_step(
    rank: Rank, data: StepData, waited_s: float, first: bool, kl_coef: float = 0.0
) -> Trained:
    """Train on a sealed step; every rank must call this.

    Args:
        rank: This training rank.
        data: This rank's data for the step.
        waited_s: Seconds that the rank waited for its data.
        first: Whether the step is the first of an attempt.
        kl_coef: Weight of the KL penalty in the reward.

    Raises:
        ReplayError: The recorded routes do not fit the model, or a pass did not use them correctly.
        UpdateError: An update was impossible, for example because a number was not finite.
        TraceError: A stored sample or route is missing or corrupt.
        StoreError: The store failed.
    """
    replay = rank.config.actor_rollout_ref.actor.router_replay
    measured = dict.fromkeys(TIMES, Measured(max, None))
    health = NOT_REPLAYED
    # Without this wait, a rank that has all its samples would enter a collective in a pass, and
    # wait there for a rank that is still reading.
    data.samples.await_all(data.ids.values())
    await_ranks()
    with timed(measured, "timing_s/log_probs"):
        rank.offload.before_log_probs()
        sweeps = _sweep(rank, data, first, measured)
        trained = sweeps.trained
        if replay.replays_recorded and trained is not None:
            sweeps, health = _examine(rank, data, sweeps, trained, measured)
    with timed(measured, "timing_s/adv"):
        correction = rank.config.algorithm.rollout_correction
        old = None if trained is None or correction.bypass_mode else trained.logprobs
        values = None if sweeps.values is None else sweeps.values.values
        compared = compare(rank, data, old, sweeps.reference, kl_coef, values)
    updates, of_critic = results = _updates(rank, data, compared, sweeps, measured)
    measured["timing_s/trace_wait"] = Measured(max, waited_s + data.wait_s)

    reports = gathered(_report(rank, data, sweeps, compared, results, measured))
    passes = total_counts(reports)
    if must_replay(rank.config, data.step, passes):
        _check(rank, data, passes)
    tally = sum((report.corrections for report in reports), start=Tally())
    kl = next((report.reward_kl for report in reports if report.reward_kl is not None), None)
    metrics = {
        **reduced([report.measured for report in reports]),
        **policy_metrics([report.updates for report in reports], updates),
        **replay_metrics(passes),
        **correction_metrics(correction.correction, tally),
        **health.metrics,
        "actor/reward_kl_penalty": None if kl is None else kl.mean,
        "actor/reward_kl_penalty_coeff": None if kl is None else kl_coef,
    }
    if of_critic is not None:
        metrics |= critic_metrics([report.critic_updates for report in reports], of_critic, passes)
    coming = None if kl is None else next_coefficient(kl_coef, kl, rank.config.algorithm.kl_ctrl)
    return Trained(metrics, sweeps.recorded, coming)


def _report(
    rank: Rank,
    data: StepData,
    sweeps: _Sweeps,
    compared: Compared,
    results: tuple[Updates, Updates | None],
    measured: Mapping[str, Measured],
) -> RankReport:
    """Return this rank's numbers, excluding what another rank reports.

    `results` are those of the policy's and of the critic's updates.
    """
    position, (updates, of_critic) = rank.position, results
    found = dict(measured)
    found |= {name: Measured(max, used) for name, used in memory_peaks().items()}
    fetched = None if data.routes is None else data.routes.fetched_bytes
    found["replay/bytes_fetched"] = Measured(sum, fetched)
    corrections = Tally()
    if position.speaks_for_samples:
        trained = None if sweeps.trained is None else sweeps.trained.logprobs
        found |= measured_mismatch(data, trained, sweeps.native, sweeps.older)
        found |= measured_finish_reasons(finish_reasons_of(data), rank.config)
        found |= measured_advantages(compared)
        if of_critic is not None:
            found |= measured_values(compared)
        # Either the step has one tally, or its updates have computed several.
        corrections = sum(updates.tallies, start=compared.tally or Tally())
    return RankReport(
        measured=found,
        updates=updates.sums if position.speaks_for_tokens else (),
        critic_updates=of_critic.sums if of_critic and position.speaks_for_tokens else (),
        counts=_replays(rank, sweeps, updates, of_critic) if position.speaks_for_rows else {},
        corrections=corrections,
        reward_kl=compared.kl,
    )


def _updates(
    rank: Rank, data: StepData, compared: Compared, sweeps: _Sweeps, measured: dict[str, Measured]
) -> tuple[Updates, Updates | None]:
    """Update the critic, if the run has one, and, after the critic's warm-up, the policy.

    Returns the results of the policy's updates and of the critic's.
    """
    of_critic = None
    if rank.critic is not None:
        with timed(measured, "timing_s/update_critic"), rank.offload.of_critic():
            routes = _critic_routes(rank, sweeps.routes)
            of_critic = update_critic(rank, rank.critic, data, compared, routes)
    rank.offload.before_updates()  # the export needs these parts even without an update
    if rank.config.has_staleness_pass(data.step + 1):
        rank.older.keep(data.step, rank.chunks)
    if _warms_up(rank.config, data.step):
        return Updates(), of_critic
    with timed(measured, "timing_s/update_actor"):
        return update(rank, data, compared, sweeps.routes), of_critic


def _critic_routes(rank: Rank, routes: Mapping[str, Routes] | None) -> Mapping[str, Routes] | None:
    """Return the routes that the critic replays; None selects native routing."""
    return routes if rank.config.critic.replay_routes else None


def _replays(
    rank: Rank, sweeps: _Sweeps, updates: Updates, of_critic: Updates | None
) -> dict[str, Counts]:
    """Return the counts of the passes that replayed routes, keyed by the pass's name."""
    if sweeps.routes is None:
        return {}
    passes: dict[str, Counts] = {}
    if sweeps.recorded is None and sweeps.trained is not None:
        passes["log-prob pass"] = sweeps.trained.counts
    passes |= {f"update epoch {epoch}": counts for epoch, counts in enumerate(updates.counts)}
    if rank.config.critic.replay_routes and sweeps.values is not None and of_critic is not None:
        passes[f"{CRITIC}values"] = sweeps.values.counts
        passes |= {f"{CRITIC}epoch {i}": counts for i, counts in enumerate(of_critic.counts)}
    return passes


def _warms_up(config: RunConfig, step: int) -> bool:
    """Return whether only the critic is trained in this step."""
    return step < config.trainer.critic_warmup


def must_replay(config: RunConfig, step: int, of_passes: Mapping[str, Counts]) -> bool:
    """Return whether the step's passes must have replayed all of its routes.

    A step that trains only the critic may have no pass with replay, because with R2 the log-prob
    pass records instead, and bypass_mode omits that pass.

    Args:
        config: The run's settings.
        step: The trained step.
        of_passes: Counts over all ranks for the passes with replay, keyed by the pass's name.
    """
    replay = config.actor_rollout_ref.actor.router_replay
    replays = replay.replays_recorded or replay.records_routes
    return replays and bool(of_passes or not _warms_up(config, step))


def _sweep(rank: Rank, data: StepData, first: bool, measured: dict[str, Measured]) -> _Sweeps:
    """Run the log-prob passes of the trained model and the reference, and the critic's value pass.

    With bypass_mode, the trained model's log-probs are not needed. The pass still runs in the first
    step of an attempt and once every native_every steps, to examine recorded routes.
    """
    routes: Mapping[str, Routes] | None = data.routes
    recorded, native = None, None
    measures = routes is not None and (first or _measures_native(rank, data.step))
    trained: LogProbPass | None = None
    if measures or not rank.config.algorithm.rollout_correction.bypass_mode:
        _say(data, "log-probs")
        with timed(measured, "timing_s/old_log_prob"):
            trained = _trained_pass(rank, data)
        if rank.config.actor_rollout_ref.actor.router_replay.records_routes:
            routes = recorded = trained.routes
        if data.routes is None:
            native = trained.logprobs  # the pass was native
    if measures:
        native = _native(rank, data, measured)
    older = None
    # An attempt's first step has no copy, because the earlier weights are not in memory.
    if rank.config.has_staleness_pass(data.step) and _has_older(rank, data):
        _say(data, "log-probs with the weights that generated the samples")
        with timed(measured, "timing_s/older_log_prob"), rank.older.in_use(rank.chunks):
            older = native_pass(rank, data, rank.chunks).logprobs
    reference = None
    if rank.reference is not None:
        _say(data, "log-probs of the reference")
        with timed(measured, "timing_s/ref"), rank.offload.of_reference():
            reference = native_pass(rank, data, rank.reference).logprobs
    values = None
    if rank.critic is not None:
        _say(data, "values")
        with timed(measured, "timing_s/values"), rank.offload.of_values():
            values = values_pass(rank, rank.critic, data, _critic_routes(rank, routes))
    return _Sweeps(trained, native, older, reference, values, routes, recorded)


def _native(rank: Rank, data: StepData, measured: dict[str, Measured]) -> LogProbs:
    """Compute the trained model's log-probs with native routing, to measure the mismatch."""
    _say(data, "log-probs with native routing")
    with timed(measured, "timing_s/native_log_prob"):
        return native_pass(rank, data, rank.chunks).logprobs


def _has_older(rank: Rank, data: StepData) -> bool:
    """Return whether the rank kept the weights of the version that generated all samples."""
    return data.manifest.policy_versions == (rank.older.version,)


def _trained_pass(rank: Rank, data: StepData) -> LogProbPass:
    """Run the trained model's log-prob pass, with the same routing as the updates."""
    if rank.config.actor_rollout_ref.actor.router_replay.records_routes:
        return recording_pass(rank, data)
    if data.routes is not None:
        return replaying_pass(rank, data, data.routes)
    return native_pass(rank, data, rank.chunks)


def _examine(
    rank: Rank, data: StepData, sweeps: _Sweeps, trained: LogProbPass, measured: dict[str, Measured]
) -> tuple[_Sweeps, Health]:
    """Compare the recorded routes with the router's choices, and return the verdict for all ranks.

    If the KL is too high for the latest native KL, the native pass also runs in this step, because
    the native KL itself may have risen. Raises ReplayError on all ranks if the routes do not fit,
    unless a setting turns the error into a warning.
    """
    replay = rank.config.actor_rollout_ref.actor.router_replay
    speaks = rank.position.speaks_for_rows
    of_rank = Evidence(
        layers=tuple(trained.counts) if speaks else (),
        samples=trained.samples if speaks else {},
        replayed=_mismatch(rank, data, trained.logprobs),
        native=_mismatch(rank, data, sweeps.native),
    )
    evidence = gathered(of_rank)
    replayed = total_mismatch(one.replayed for one in evidence)
    if sweeps.native is None and replayed and kl_too_high(replayed, rank.native.kl):
        sweeps = replace(sweeps, native=_native(rank, data, measured))
        evidence += gathered(Evidence(native=_mismatch(rank, data, sweeps.native)))
    native = total_mismatch(one.native for one in evidence)
    if native is not None and native.kl is not None:
        rank.native.kl = native.kl
    health = judge(evidence, replay.min_agreement)
    if not health.reasons:
        return sweeps, health
    key = "actor_rollout_ref.actor.router_replay"
    found = (
        f"step {data.step}: the recorded routes do not fit this model: "
        f"{'; '.join(health.reasons)} ({health.tokens} response tokens)"
    )
    if replay.on_unhealthy == "warn" or replay.replay_other_weights:
        logger.warning("%s; training on them anyway (counted as replay/unhealthy)", found)
        return sweeps, health
    raise ReplayError(
        f"{found}. The step was not trained. The routes are shifted, or they belong to other "
        "samples or other weights. Check the engine's version and every component between the "
        "engine and the store. Then record the routes again in another run, or train on them "
        f"anyway with {key}.on_unhealthy=warn"
    )


def _check(rank: Rank, data: StepData, of_passes: Mapping[str, Counts]) -> None:
    """Raise ReplayError unless every pass replayed all recorded rows."""
    valid, rows = valid_rows(data.columns)
    records = rank.config.actor_rollout_ref.actor.router_replay.records_routes
    valid = rows if records else valid
    check_passes(data.step, of_passes, rank.routers, valid, rows)


def _say(data: StepData, what: str) -> None:
    progress.say(f"step {data.step}: {what}", len(data.layout.epoch(0)), "mini-batches")


def _measures_native(rank: Rank, step: int) -> bool:
    every = rank.config.actor_rollout_ref.actor.router_replay.native_every
    return every > 0 and step % every == 0


def _mismatch(rank: Rank, data: StepData, logprobs: LogProbs | None) -> Mismatch | None:
    if logprobs is None or not rank.position.speaks_for_samples:
        return None
    return mismatch_of(data, logprobs)
