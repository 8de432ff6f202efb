"""The steps of a run, which are the same for local workers and for workers in a cluster.

    prepare ── validate ── step 0: rollout ─ train ── step 1: rollout ─ train ── ... ── stop
                                     └── with max_staleness 1, rollout N+1 overlaps train N

The flow starts the workers and watches them, publishes plans and seals steps, but does not move
tensors. It may be killed at any moment. When the flow is started again with the same config, it
attaches to the run and continues with the first unfinished step.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from prefect.futures import PrefectFuture

from pipeline.config.tree import RunConfig
from pipeline.flows.artifacts import Artifacts
from pipeline.flows.steps import Context, record, rollout, train, validate
from pipeline.inputs.stage import StagedRun
from pipeline.launch.base import LaunchError, Screen, Workers
from pipeline.report.run_metrics import (
    StepMetrics,
    missing_validations,
    newest_validations,
    read_metrics,
)
from pipeline.report.tables import SHOWN_STEPS, recent_table, step_line
from pipeline.report.trackers.processes import TrackerProcess, trackers_of
from pipeline.run import keys
from pipeline.run.attempts import Attempt, Claim, end_attempt, has_finished, in_force
from pipeline.run.restarts import finished_steps, repeated_text
from pipeline.store import Store, StoreError

_FAILED_GRACE_S = 5.0


Launch = Callable[[RunConfig, StagedRun, Attempt], AbstractContextManager[Workers]]
"""Starts an attempt's workers or attaches to them, on this machine or in a cluster."""


@dataclass(frozen=True)
class _OwnWorkers:
    """The workers of an attempt, as long as this process owns the attempt."""

    workers: Workers
    claim: Claim
    stop: Callable[[float], None]
    detach: Callable[[], bool]

    def check(self) -> bool:
        """See Workers.check. Also raises LaunchError if another start has ended the attempt."""
        if self.claim.is_lost():
            key = keys.stop(self.claim.attempt.number)
            raise LaunchError(
                f"another start of the run wrote {key}, because this one gave no sign of life for "
                "too long; the other start continues the run"
            )
        return self.workers.check()


def drive(
    run: StagedRun, claim: Claim, screen: Screen, artifacts: Artifacts, launch: Launch
) -> None:
    """Run a staged run to its last step.

    Args:
        run: The staged run.
        claim: The attempt, which this process owns.
        screen: Shows the run's progress.
        artifacts: The run's artifacts in Prefect's UI.
        launch: Starts the workers.

    Raises:
        InputError: An input is invalid or too small; for example, a step's prompts are used up.
        LaunchError: Workers cannot be started, or fail too often.
        WaitTimeoutError: An object does not appear in time.
        StoreError: The store fails.
        TraceError: A trace is invalid.
    """
    artifacts.link("store", run.uri)
    attempt = claim.attempt
    before = attempt.number - 1
    was_completed = not claim.continued and before >= 0 and has_finished(run.store, before)
    config = in_force(run.config, attempt)
    finished = finished_steps(run.store)
    if finished:
        screen.line(f"attached to {run.uri}: {finished} steps are already finished")
    # The trainers of a continued attempt still have their state and do not repeat steps.
    if not claim.continued and 0 < finished < config.trainer.total_training_steps:
        _show(screen, repeated_text(run.store))
    for step in range(finished):  # an earlier flow may have ended before it recorded all steps
        record(config, run, step)
    to_validate = _to_validate(run, attempt, finished, screen)
    works = finished < config.trainer.total_training_steps or bool(to_validate)
    if works or not was_completed:
        recent = _recent_metrics(run.store, finished)
        with trackers_of(config, run.store, screen.line) as trackers:
            _send_again(run.store, trackers, recent, attempt)
            if works:
                with _workers(config, run, claim, screen, launch) as workers:
                    context = Context(config, run, attempt, workers, screen, trackers)
                    _steps(context, artifacts, finished, recent, to_validate)
    if not works:  # if an earlier flow was lost just before this call, its workers still run
        end_attempt(run.store, attempt, "finished", "")


def _show(screen: Screen, text: str | None) -> None:
    if text is not None:
        screen.line(text)


def _send_again(
    store: Store,
    trackers: Sequence[TrackerProcess],
    recent: Iterable[StepMetrics],
    attempt: Attempt,
) -> None:
    """Send the newest results to trackers; an earlier flow may have ended before they arrived."""
    if not trackers:
        return
    validations = newest_validations(store, attempt.validations, SHOWN_STEPS)
    for tracker in trackers:
        for metrics in recent:
            tracker.log("step", metrics.step, metrics.values, again=True)
        for validation in validations:
            tracker.log("validation", validation.version, validation.metrics(), again=True)


def _steps(
    context: Context,
    artifacts: Artifacts,
    first: int,
    recent: deque[StepMetrics],
    to_validate: list[int],
) -> None:
    """Run the steps from the first unfinished one; `recent` holds the metrics of earlier steps."""
    total = context.config.trainer.total_training_steps
    staleness = context.config.trainer.max_staleness
    artifacts.progress(100.0 * first / total)
    rollouts: dict[int, PrefectFuture[None]] = {}
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
    """Return the metrics of the newest finished steps, in a deque limited to SHOWN_STEPS."""
    steps = range(max(0, finished - SHOWN_STEPS), finished)
    found = [metrics for step in steps if (metrics := read_metrics(store, step)) is not None]
    return deque(found, maxlen=SHOWN_STEPS)


def _to_validate(run: StagedRun, attempt: Attempt, finished: int, screen: Screen) -> list[int]:
    """Return the policy versions whose validation is missing but still possible."""
    missing, gone = missing_validations(run.store, attempt.validations, finished)
    if gone:
        screen.line(f"policies {gone} are not validated, because they are no longer in the store")
    return missing


@contextlib.contextmanager
def _workers(
    config: RunConfig, run: StagedRun, claim: Claim, screen: Screen, launch: Launch
) -> Iterator[Workers]:
    """Start the workers or attach to them, and end them in an orderly way after success or failure.

    If the flow itself is ended from outside (for example, by Ctrl-C or because its pod is moved),
    workers that can outlive a flow are not ended, and the next flow attaches to them.
    """
    attempt = claim.attempt
    with contextlib.ExitStack() as stack:
        try:
            workers = stack.enter_context(launch(config, run, attempt))
        except LaunchError as error:
            _end_attempt(run, attempt, "failed", str(error), screen)
            raise
        reason, message = "cancelled", "the flow ended"
        try:
            yield _OwnWorkers(workers, claim, workers.stop, workers.detach)
            reason, message = "finished", ""
        except Exception as error:
            reason, message = "failed", str(error)
            raise
        finally:
            if reason != "cancelled" or not workers.detach():
                _end_attempt(run, attempt, reason, message, screen)
                # After the last step, a trainer may still be writing that step's checkpoint.
                grace_s = config.launch.step_timeout_s if reason == "finished" else _FAILED_GRACE_S
                workers.stop(grace_s)


def _end_attempt(
    run: StagedRun, attempt: Attempt, reason: str, message: str, screen: Screen
) -> None:
    """End the attempt in the store, so that the workers stop.

    If the run failed because the store cannot be reached, ending the attempt fails too. This
    second error must not hide the first, so it is only shown, and the launcher kills the workers.
    """
    try:
        end_attempt(run.store, attempt, reason, message)
    except StoreError as error:
        if reason == "finished":
            raise
        screen.line(f"the request to stop failed, so the workers are killed: {error}")
