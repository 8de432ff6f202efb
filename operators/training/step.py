"""One step of a training rank, from a sealed manifest to the metrics; it writes nothing.

read own share ─► old log-probs ─► [reference] ─► [values] ─► advantages ─► updates ─► reports
                  disabled: native              native                  native
                  R2: native, recorded ──routes──────────────────────► replayed
                  R3: replayed ◄──routes of the engine───────────────► replayed
                  (R3, first of an attempt and every native_every steps: once more, native)
                  bypass_mode: the engine's; the pass is made in those steps of R3 only
                     └► do the recorded routes fit? else ReplayError on all ranks
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from operators.training.agree import gathered
from operators.training.batches.step_data import StepData, valid_rows, without_loss
from operators.training.critic_step import (
    PASS,
    CriticStep,
    critic_metrics,
    sweep_values,
    train_critic,
)
from operators.training.errors import ReplayError
from operators.training.passes.compared import Compared, compare
from operators.training.passes.flat import BySample
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
from operators.training.replay.health import LEAST_TOKENS, NOT_REPLAYED, Evidence, Health, judge
from operators.training.speed import Stopwatch, memory_peaks
from operators.training.step_metrics import (
    Metrics,
    RankReport,
    Spread,
    finish_reasons_of,
    mismatch_of,
    reward_kl_metrics,
    reward_kl_of,
    spread_of,
    total_counts,
    total_tally,
    training_metrics,
)
from pipeline import progress
from pipeline.config.tree import RunConfig
from pipeline.rl.corrections.report import correction_metrics
from pipeline.rl.corrections.tally import Tally
from pipeline.rl.estimators.reward_kl import next_coefficient
from pipeline.rl.mismatch import Mismatch
from pipeline.traces.format.types import Routes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trained:
    """The results of a trained step."""

    metrics: Metrics
    """Equal on all ranks."""
    counts: Counts
    """Counts of the first replaying pass, by layer, over all ranks."""
    recorded: Mapping[str, Routes] | None
    """R2: the routes that this rank's log-prob pass recorded, to be stored."""
    next_kl_coef: float | None = None
    """Weight of the KL in the next step's reward, equal on all ranks; None: there is no such KL."""


@dataclass(frozen=True)
class _Sweeps:
    """The results of the log-prob passes on this rank."""

    trained: LogProbPass | None
    """As it is trained; None: bypassed."""
    native: LogProbs | None
    """With native routing; None: not measured."""
    reference: LogProbs | None
    values: BySample | None
    """None: there is no critic."""
    value_counts: Counts
    """Counts of replay of the critic's pass."""
    routes: Mapping[str, Routes] | None
    """What the updates replay; None: nothing."""
    recorded: Mapping[str, Routes] | None


def train_step(
    rank: Rank, data: StepData, waited_s: float, first: bool, kl_coef: float = 0.0
) -> Trained:
    """Train on a sealed step; `waited_s` is how long the rank has waited for its data.

    `first`: the step is the first of an attempt. `kl_coef` weighs the KL in the reward. Raises
    ReplayError, UpdateError, TraceError, StoreError.
    """
    replay = rank.config.actor_rollout_ref.actor.router_replay
    watch = Stopwatch()
    health = NOT_REPLAYED
    with watch.of("timing_s/log_probs"):
        rank.offload.before_log_probs()
        sweeps = _sweep(rank, data, first, watch)
        trained = sweeps.trained
        if replay.replays_recorded and trained is not None:
            health = _examine(rank, data, trained, sweeps.native)
    with watch.of("timing_s/adv"):
        correction = rank.config.algorithm.rollout_correction
        old = None if trained is None or correction.bypass_mode else trained.logprobs
        compared = compare(rank, data, old, sweeps.reference, kl_coef, sweeps.values)
    of_critic, updates = _updates(rank, data, compared, sweeps, watch)

    position = rank.position
    reasons = finish_reasons_of(data) if position.speaks_for_samples else Counter[str]()
    passes = _replays(sweeps, updates, of_critic)
    reports = gathered(
        RankReport(
            mismatch=None if trained is None else _mismatch(rank, data, trained.logprobs),
            mismatch_native=None if sweeps.native is None else _mismatch(rank, data, sweeps.native),
            corrections=_tally(compared, updates) if position.speaks_for_samples else None,
            updates=updates.sums if position.speaks_for_tokens else (),
            reward_kl=compared.kl,
            advantages=_advantages(compared) if position.speaks_for_samples else None,
            critic=None if of_critic is None else of_critic.report,
            counts=passes if position.speaks_for_rows else {},
            times_s={**watch.times_s, "timing_s/trace_wait": waited_s + data.wait_s},
            memory=memory_peaks(),
            fetched_bytes=None if data.routes is None else data.routes.fetched_bytes,
            finish_reasons=reasons,
            without_loss=sum(reasons[reason] for reason in without_loss(rank.config)),
        )
    )
    of_passes = total_counts(reports)
    if must_replay(rank.config, data.step, of_passes):
        _check(rank, data, of_passes)
    counts = next((of for name, of in of_passes.items() if not name.startswith(PASS)), {})
    metrics = training_metrics(reports, counts, updates.grad_norms)
    metrics |= correction_metrics(correction.correction, total_tally(reports))
    if of_critic is not None:
        metrics |= critic_metrics([report.critic for report in reports], of_critic, of_passes)
    metrics |= {"actor/lr": updates.lr, "update/skipped": updates.skipped}
    metrics |= {"update/skipped_empty": updates.empty} | health.metrics
    kl = reward_kl_of(reports)
    metrics |= reward_kl_metrics(kl, kl_coef)
    coming = None if kl is None else next_coefficient(kl_coef, kl, rank.config.algorithm.kl_ctrl)
    return Trained(metrics, counts, sweeps.recorded, coming)


def _updates(
    rank: Rank, data: StepData, compared: Compared, sweeps: _Sweeps, watch: Stopwatch
) -> tuple[CriticStep | None, Updates]:
    """Update the critic, if there is one, and the policy, unless only the critic is trained yet."""
    of_critic = None
    if rank.critic is not None:
        with watch.of("timing_s/update_critic"):
            sweep = (sweeps.value_counts, sweeps.routes)
            of_critic = train_critic(rank, rank.critic, data, compared, sweep)
    rank.offload.before_updates()  # the export needs it, too
    if _warms_up(rank.config, data.step):
        return of_critic, Updates()
    with watch.of("timing_s/update_actor"):
        return of_critic, update(rank, data, compared, sweeps.routes)


def _replays(sweeps: _Sweeps, updates: Updates, of_critic: CriticStep | None) -> dict[str, Counts]:
    """The counts of the passes that have replayed routes, by name."""
    if sweeps.routes is None:
        return {}
    passes: dict[str, Counts] = {}
    if sweeps.recorded is None and sweeps.trained is not None:
        passes["log-prob pass"] = sweeps.trained.counts
    passes |= {f"update epoch {epoch}": counts for epoch, counts in enumerate(updates.counts)}
    return passes | ({} if of_critic is None else of_critic.counts)


def _warms_up(config: RunConfig, step: int) -> bool:
    """Whether only the critic is trained in this step."""
    return step < config.trainer.critic_warmup


def must_replay(config: RunConfig, step: int, of_passes: Mapping[str, Counts]) -> bool:
    """Whether passes of a step, those that have replayed routes on any rank, must have used all.

    While only the critic is trained there need be none: with R2 the log-prob pass records, and
    bypass_mode leaves it out.
    """
    replay = config.actor_rollout_ref.actor.router_replay
    replays = replay.replays_recorded or replay.records_routes
    return replays and bool(of_passes or not _warms_up(config, step))


def _sweep(rank: Rank, data: StepData, first: bool, watch: Stopwatch) -> _Sweeps:
    """Make the log-prob passes of the trained model and the reference.

    bypass_mode has no use for the trained model's. Recorded routes are examined by it all the same,
    in the first step of an attempt and wherever the native pass is measured.
    """
    routes: Mapping[str, Routes] | None = data.routes
    recorded, native = None, None
    measures = routes is not None and (first or _measures_native(rank, data.step))
    trained: LogProbPass | None = None
    if measures or not rank.config.algorithm.rollout_correction.bypass_mode:
        _say(data, "log-probs")
        with watch.of("timing_s/old_log_prob"):
            trained = _trained_pass(rank, data)
        if rank.config.actor_rollout_ref.actor.router_replay.records_routes:
            routes = recorded = trained.routes
        if data.routes is None:
            native = trained.logprobs  # the pass was native
    if measures:
        _say(data, "log-probs with native routing")
        with watch.of("timing_s/native_log_prob"):
            native = native_pass(rank, data, rank.chunks).logprobs
    reference = None
    if rank.reference is not None:
        _say(data, "log-probs of the reference")
        with watch.of("timing_s/ref"), rank.offload.of_reference():
            reference = native_pass(rank, data, rank.reference).logprobs
    values: BySample | None = None
    counts: Counts = {}
    if rank.critic is not None:
        with watch.of("timing_s/values"):
            values, counts = sweep_values(rank, rank.critic, data, routes)
    return _Sweeps(trained, native, reference, values, counts, routes, recorded)


def _trained_pass(rank: Rank, data: StepData) -> LogProbPass:
    """Make the log-prob pass of the trained model with the routing that it is trained with."""
    if rank.config.actor_rollout_ref.actor.router_replay.records_routes:
        return recording_pass(rank, data)
    if data.routes is not None:
        return replaying_pass(rank, data, data.routes)
    return native_pass(rank, data, rank.chunks)


def _examine(rank: Rank, data: StepData, trained: LogProbPass, native: LogProbs | None) -> Health:
    """Judge the recorded routes by the passes that have replayed them, equally on all ranks.

    Raises ReplayError, on all ranks, unless a setting makes it a warning.
    """
    replay = rank.config.actor_rollout_ref.actor.router_replay
    position = rank.position
    of_rank = Evidence(
        counts=trained.counts if position.speaks_for_rows else {},
        samples=trained.samples if position.speaks_for_rows else {},
        replayed=_mismatch(rank, data, trained.logprobs),
        native=None if native is None else _mismatch(rank, data, native),
    )
    health = judge(gathered(of_rank), replay.min_agreement)
    if not health.judged:
        logger.info(
            "step %d: %d response tokens, fewer than the %d that a verdict on the recorded routes "
            "needs; only samples of many rows were judged",
            data.step,
            health.tokens,
            LEAST_TOKENS,
        )
    if not health.findings:
        return health
    key = "actor_rollout_ref.actor.router_replay"
    found = (
        f"step {data.step}: the recorded routes do not fit this model: "
        f"{'; '.join(health.findings)} ({health.tokens} response tokens; agreement of sets of "
        f"experts, at least {replay.min_agreement:.0%} expected by {key}.min_agreement)"
    )
    if replay.on_unhealthy == "warn" or replay.replay_other_weights:
        logger.warning("%s; it is trained on all the same (counted as replay/unhealthy)", found)
        return health
    raise ReplayError(
        f"{found}. Nothing of the step was trained. The routes are shifted, of other samples or of "
        "other weights: look at the engine's version and at whatever stands between it and the "
        f"store; make them anew in another run, or train on them all the same: {key}.on_unhealthy="
        "warn"
    )


def _advantages(compared: Compared) -> Spread | None:
    """The advantages of this rank's tokens that count; None: it has none."""
    return spread_of(of[compared.mask[id]] for id, of in compared.advantages.items())


def _tally(compared: Compared, updates: Updates) -> Tally:
    """What the corrections found: once for the step, or in all its updates."""
    return sum(updates.tallies, start=Tally()) if compared.tally is None else compared.tally


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
    return mismatch_of(data, logprobs) if rank.position.speaks_for_samples else None
