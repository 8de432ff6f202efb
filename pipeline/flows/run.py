"""The flow of a run whose workers are processes of this machine."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from prefect import flow
from rich.console import Console

from pipeline.config.attempt import Attempt
from pipeline.config.tree import RunConfig
from pipeline.flows.artifacts import Artifacts
from pipeline.flows.attempt import begin_attempt, validations_of
from pipeline.flows.drive import Place, drive
from pipeline.flows.records import Run
from pipeline.launch.base import Workers
from pipeline.launch.local import (
    local_workers,
    rollout_stage,
    threads_per_worker,
    training_stage,
)
from pipeline.report.display import Display, warnings_of
from pipeline.report.loggers import local_folder, tensorboard_folder
from pipeline.report.metrics import all_metrics, validation_rewards
from pipeline.report.tables import closing_table, summary
from pipeline.store.settings import use_settings


@flow(name="retrace", flow_run_name="{config.trainer.experiment_name}", validate_parameters=False)
def run_flow(config: RunConfig) -> str:
    """Run, or attach to, the run that a config describes. Returns the run's URI.

    Raises what `drive` raises.
    """
    use_settings(config.store)  # the workers inherit them
    name = config.trainer.experiment_name
    with (
        Display(Console(stderr=True)) as display,
        warnings_of("pipeline.store", display.line),
        Artifacts(name, display.line) as artifacts,
    ):
        place = Place(False, begin_attempt, partial(_workers, config, display))
        run = drive(config, display, artifacts, place)
    _report(config, run)
    return run.uri


@contextlib.contextmanager
def _workers(config: RunConfig, display: Display, run: Run, attempt: Attempt) -> Iterator[Workers]:
    """The workers as processes; nothing of them is left after the block."""
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
    display.phase("workers", f"starting; logs in {log_folder(config)}")
    with local_workers(log_folder(config), stages, display.line) as workers:
        yield workers


def log_folder(config: RunConfig) -> Path:
    """Where the workers' logs lie on this machine."""
    return local_folder(config) / "logs"


def _report(config: RunConfig, run: Run) -> None:
    console = Console(highlight=False, soft_wrap=True)
    rewards = validation_rewards(run.store, validations_of(config))
    steps = all_metrics(run.store)
    console.print(closing_table(steps, rewards))
    for line in summary(steps, rewards):
        console.print(line)
    place = f"{config.store.uri.rstrip('/')}/{config.trainer.experiment_name}"
    console.print(f"run      {place}")
    console.print(f"logs     {log_folder(config)}")
    if "tensorboard" in config.trainer.logger:
        console.print(f"curves   tensorboard --logdir {tensorboard_folder(config)}")
    console.print(f"traces   retrace traces ls {place}")
