"""The steps of a run, wherever its workers are.

    prepare ── validate ── step 0: rollout ─ train ── step 1: rollout ─ train ── ... ── stop
                                     └── with max_staleness 1, rollout N+1 runs beside train N

The flow starts the workers, publishes plans, seals steps and watches; it moves no tensors. It may
be killed at any moment: when it is started again with the same config, it attaches to the run and
goes on with the first unfinished step.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from prefect.futures import PrefectFuture

from pipeline.config.tree import RunConfig
from pipeline.flows.artifacts import Artifacts
from pipeline.flows.steps import Context, record, rollout, train, validate
from pipeline.inputs.stage import StagedRun
from pipeline.launch.base import LaunchError, Screen, Workers
from pipeline.report.run_metrics import StepMetrics, missing_validations, read_metrics
from pipeline.report.tables import SHOWN_STEPS, recent_table, step_line
from pipeline.report.trackers.processes import trackers_of
from pipeline.run.attempts import Attempt, attempt_count, end_attempt, in_force
from pipeline.run.restarts import finished_steps, repeated_text
from pipeline.store import Store, StoreError

_STOP_GRACE_S = 30.0
_FAILED_GRACE_S = 5.0


@dataclass(frozen=True)
class WorkerHost:
    """Where a run's workers are, and how they are reached."""

    begin: Callable[[Store, RunConfig], Attempt]
    """A new attempt, or the one to attach to."""
    launch: Callable[[RunConfig, StagedRun, Attempt], AbstractContextManager[Workers]]
    """Its workers, started or attached to."""


def drive(
    config: RunConfig, run: StagedRun, screen: Screen, artifacts: Artifacts, host: WorkerHost
) -> None:
    """Take a staged run to its last step.

    Raises InputError before anything starts; LaunchError when workers cannot start, or fail too
    often; WaitTimeoutError when an object does not appear in time; StoreError; TraceError.
    """
    artifacts.link("store", run.uri)
    attempts = attempt_count(run.store)
    attempt = host.begin(run.store, config)
    config = in_force(config, attempt)
    finished = finished_steps(run.store)
    if finished:
        screen.line(f"attached to {run.uri}: {finished} steps are finished already")
    # Trainers of an attempt that goes on have their state.
    if attempt.number >= attempts and 0 < finished < config.trainer.total_training_steps:
        _show(screen, repeated_text(run.store))
    for step in range(finished):  # an earlier start may have ended before it wrote them
        record(config, run, step)
    to_validate = _to_validate(run, attempt, finished, screen)
    if finished < config.trainer.total_training_steps or to_validate:
        with (
            trackers_of(config, run.store, screen.line) as trackers,
            _workers(config, run, attempt, screen, host) as workers,
        ):
            context = Context(config, run, attempt, workers, screen, trackers)
            _steps(context, artifacts, finished, to_validate)
    else:  # workers of an attempt whose flow was lost at its very end may still wait for this
        end_attempt(run.store, attempt, "finished", "")


def _show(screen: Screen, text: str | None) -> None:
    if text is not None:
        screen.line(text)


def _steps(context: Context, artifacts: Artifacts, first: int, to_validate: list[int]) -> None:
    """Take the run from its first unfinished step to its end."""
    total = context.config.trainer.total_training_steps
    staleness = context.config.trainer.max_staleness
    artifacts.progress(100.0 * first / total)
    rollouts: dict[int, PrefectFuture[None]] = {}
    recent = _recent_metrics(context.run.store, first)
    for tracker in context.trackers:
        for metrics in recent:  # an earlier start may have ended before they arrived
            tracker.log_step(metrics.step, metrics.values, again=True)
    validations = [validate.submit(context, v) for v in to_validate if v < first]
    for step in range(first, total):
        context.screen.step(step, total)
        if step in to_validate:
            validations.append(validate.submit(context, step))
        for ahead in range(step, min(step + staleness, total - 1) + 1):
            if ahead not in rollouts:
                rollouts[ahead] = rollout.submit(context, ahead)
        rollouts.pop(step).result()
        context.screen.phase("workers", None)
        metrics = train(context, step)
        if "console" in context.config.trainer.logger:
            context.screen.line(step_line(metrics, total))
        artifacts.progress(100.0 * (step + 1) / total)
        recent.append(metrics)
        artifacts.table("metrics", *recent_table(recent, context.run.uri))
    context.screen.phase("run", None)
    validations += [validate.submit(context, v) for v in to_validate if v >= max(first, total)]
    for validation in validations:
        validation.result()


def _recent_metrics(store: Store, finished: int) -> deque[StepMetrics]:
    """Metrics of the newest finished steps; it drops the oldest when it is full."""
    steps = range(max(0, finished - SHOWN_STEPS), finished)
    found = [metrics for step in steps if (metrics := read_metrics(store, step)) is not None]
    return deque(found, maxlen=SHOWN_STEPS)


def _to_validate(run: StagedRun, attempt: Attempt, finished: int, screen: Screen) -> list[int]:
    """The versions whose validation is missing and still possible."""
    missing, gone = missing_validations(run.store, attempt.validations, finished)
    if gone:
        screen.line(f"policies {gone} are not validated: they are no longer in the store")
    return missing


@contextlib.contextmanager
def _workers(
    config: RunConfig, run: StagedRun, attempt: Attempt, screen: Screen, host: WorkerHost
) -> Iterator[Workers]:
    """Start the workers or attach to them; end them in order, whatever happened.

    Workers that outlive the flow are left alone when the flow is only ended from outside (a pod
    that is moved, Ctrl-C): the next one attaches to them.
    """
    with contextlib.ExitStack() as stack:
        try:
            workers = stack.enter_context(host.launch(config, run, attempt))
        except LaunchError as error:
            _end_attempt(run, attempt, "failed", str(error), screen)
            raise
        reason, message = "cancelled", "the flow ended"
        try:
            yield workers
            reason, message = "finished", ""
        except Exception as error:
            reason, message = "failed", str(error)
            raise
        finally:
            if reason != "cancelled" or not workers.detach():
                _end_attempt(run, attempt, reason, message, screen)
                workers.stop(_STOP_GRACE_S if reason == "finished" else _FAILED_GRACE_S)


def _end_attempt(
    run: StagedRun, attempt: Attempt, reason: str, message: str, screen: Screen
) -> None:
    """Ask the workers to stop. If the run failed because the store cannot be reached, this fails
    too; it must not hide the first failure, and the launcher kills the workers."""
    try:
        end_attempt(run.store, attempt, reason, message)
    except StoreError as error:
        if reason == "finished":
            raise
        screen.line(f"the workers could not be asked to stop and are killed: {error}")
