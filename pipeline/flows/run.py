"""The flow of a run.

    prepare ── validate ── step 0: rollout ─ train ── step 1: rollout ─ train ── ... ── stop
                                     └── with max_staleness 1, rollout N+1 runs beside train N

The flow starts the workers, publishes plans, seals steps and watches; it moves no tensors. It may
be killed at any moment: started again with the same config it attaches to the run and goes on
with the first step that is not finished.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from uuid import UUID

from prefect import flow, task
from prefect.artifacts import (
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture
from rich.console import Console

from pipeline.config.attempt import Attempt
from pipeline.config.tree import RunConfig
from pipeline.flows.attempt import begin_attempt, end_attempt
from pipeline.flows.prepare import prepare
from pipeline.flows.records import Run
from pipeline.flows.steps import Context, record, rollout, train, validate
from pipeline.launch.local import (
    LocalWorkers,
    local_workers,
    rollout_stage,
    threads_per_worker,
    training_stage,
)
from pipeline.report.display import Display
from pipeline.report.loggers import Logger, TensorBoardLogger
from pipeline.report.metrics import StepMetrics, all_metrics, read_validation
from pipeline.report.tables import closing_table, step_line, summary
from pipeline.store import StoreError, keys
from pipeline.store.settings import use_settings

_STOP_GRACE_S = 30.0


@flow(name="retrace", flow_run_name="{config.trainer.experiment_name}", validate_parameters=False)
def run_flow(config: RunConfig) -> str:
    """Run, or attach to, the run that a config describes. Returns the run's URI.

    Raises InputError (from prepare) before anything starts, StageFailedError when workers fail too
    often, WaitTimeoutError when an object does not appear in time.
    """
    use_settings(config.store)  # the workers inherit them
    console = Console(stderr=True)
    with Display(console) as display, display.warnings_of("pipeline.store"):
        display.phase("flow", "checking and staging inputs")
        run = prepare_run(config)
        display.phase("flow", None)
        attempt = begin_attempt(run.store, config)
        finished = len(all_metrics(run.store))
        if finished:
            display.line(f"attached to {run.uri}: {finished} steps are finished already")
        for step in range(finished):  # an earlier start may have ended before it wrote them
            record(config, run, step)
        to_validate = _to_validate(run, attempt, display)
        if finished < attempt.total_training_steps or to_validate:
            with (
                _loggers(config) as loggers,
                _workers(config, run, attempt, display) as workers,
            ):
                context = Context(config, run, attempt, workers, display, loggers)
                _drive(context, finished, to_validate)
    _report(config, run, attempt)
    return run.uri


@task(cache_policy=NO_CACHE, persist_result=False, name="prepare")
def prepare_run(config: RunConfig) -> Run:
    """Validate everything, create or attach the run, publish policy 0."""
    return prepare(config)


def _drive(context: Context, first: int, to_validate: list[int]) -> None:
    """Take the run from its first unfinished step to its end."""
    total = context.attempt.total_training_steps
    staleness = context.config.trainer.max_staleness
    # The same function serves async flows, so its type says it may return a coroutine.
    progress = cast(
        UUID, create_progress_artifact(100.0 * first / total, key=_artifact(context, "progress"))
    )
    rollouts: dict[int, PrefectFuture[None]] = {}
    context.display.phase("workers", f"starting; logs in {log_folder(context.config)}")
    validations = [validate.submit(context, v) for v in to_validate if v < first]
    for step in range(first, total):
        if step in to_validate:
            validations.append(validate.submit(context, step))
        for ahead in range(step, min(step + staleness, total - 1) + 1):
            if ahead not in rollouts:
                rollouts[ahead] = rollout.submit(context, ahead)
        rollouts.pop(step).result()
        context.display.phase("workers", None)
        metrics = train(context, step)
        if "console" in context.config.trainer.logger:
            context.display.line(step_line(metrics, total))
        update_progress_artifact(progress, 100.0 * (step + 1) / total)
        _publish_table(context, all_metrics(context.run.store))
    validations += [validate.submit(context, v) for v in to_validate if v >= max(first, total)]
    for validation in validations:
        validation.result()


def _to_validate(run: Run, attempt: Attempt, display: Display) -> list[int]:
    """The versions whose validation is missing and still possible."""
    finished = len(all_metrics(run.store))
    missing = [v for v in attempt.validations if read_validation(run.store, v) is None]
    gone = [v for v in missing if v <= finished and run.store.size(keys.policy(v)) is None]
    if gone:
        display.line(f"policies {gone} are not validated: they are no longer in the store")
    return [v for v in missing if v not in gone]


@contextlib.contextmanager
def _workers(
    config: RunConfig, run: Run, attempt: Attempt, display: Display
) -> Iterator[LocalWorkers]:
    """Start the workers; end them in order, whatever happened."""
    launch = config.launch
    overlap = config.trainer.max_staleness > 0
    threads = launch.threads_per_worker or threads_per_worker(
        attempt.rollout_workers, attempt.training_ranks, overlap
    )
    stages = [
        rollout_stage(
            run.uri, attempt.number, attempt.rollout_workers, launch.max_restarts, threads
        ),
        training_stage(
            run.uri, attempt.number, attempt.training_ranks, launch.max_restarts, threads
        ),
    ]
    with local_workers(log_folder(config), stages, display.line) as workers:
        reason, message = "cancelled", "the flow ended"
        try:
            yield workers
            reason, message = "finished", ""
        except Exception as error:
            reason, message = "failed", str(error)
            raise
        finally:
            _end_attempt(run, attempt, reason, message, display)
            workers.stop(_STOP_GRACE_S if reason == "finished" else 2.0)


def _end_attempt(run: Run, attempt: Attempt, reason: str, message: str, display: Display) -> None:
    """Tell the workers to stop. If the run has failed because the store cannot be reached, neither
    can they be told: what it failed of must not be hidden by that, and the launcher kills them."""
    try:
        end_attempt(run.store, attempt, reason, message)
    except StoreError as error:
        if reason == "finished":
            raise
        display.line(f"the workers could not be told to stop and are killed: {error}")


@contextlib.contextmanager
def _loggers(config: RunConfig) -> Iterator[tuple[Logger, ...]]:
    loggers: tuple[Logger, ...] = ()
    if "tensorboard" in config.trainer.logger:
        loggers = (TensorBoardLogger(local_folder(config) / "tensorboard"),)
    try:
        yield loggers
    finally:
        for logger in loggers:
            logger.close()


def local_folder(config: RunConfig) -> Path:
    """Where a run's logs and TensorBoard files lie on this machine."""
    return Path(config.trainer.default_local_dir, config.trainer.experiment_name)


def log_folder(config: RunConfig) -> Path:
    """Where the workers' logs lie on this machine."""
    return local_folder(config) / "logs"


def _publish_table(context: Context, steps: list[StepMetrics]) -> None:
    rows = [{"step": step.step, **step.values} for step in steps]
    create_table_artifact(rows, key=_artifact(context, "metrics"))


def _artifact(context: Context, name: str) -> str:
    return f"{context.config.trainer.experiment_name}-{name}"


def _report(config: RunConfig, run: Run, attempt: Attempt) -> None:
    console = Console(highlight=False, soft_wrap=True)
    found = [read_validation(run.store, version) for version in attempt.validations]
    rewards = {validation.version: validation.reward for validation in found if validation}
    steps = all_metrics(run.store)
    console.print(closing_table(steps, rewards))
    for line in summary(steps, rewards):
        console.print(line)
    place = f"{config.store.uri.rstrip('/')}/{config.trainer.experiment_name}"
    console.print(f"run      {place}")
    console.print(f"logs     {log_folder(config)}")
    if "tensorboard" in config.trainer.logger:
        console.print(f"curves   tensorboard --logdir {local_folder(config) / 'tensorboard'}")
    console.print(f"traces   retrace traces ls {place}")
