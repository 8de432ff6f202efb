"""The flow of a run whose workers are processes of this machine."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from prefect import flow

from pipeline.config.tree import RunConfig
from pipeline.device import choose_device
from pipeline.flows.artifacts import Artifacts
from pipeline.flows.drive import WorkerHost, drive
from pipeline.hardware import gpu_pool
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.stage import StagedRun, stage
from pipeline.launch.base import Workers
from pipeline.launch.local import (
    devices_of,
    local_workers,
    rollout_stage,
    threads_per_worker,
    training_stage,
)
from pipeline.report.display import Display, warnings_of
from pipeline.report.folders import log_folder
from pipeline.run.attempts import Attempt, begin_attempt
from pipeline.store.settings import use_settings


def run_flow(inputs: CheckedInputs, display: Display, server: AbstractContextManager[None]) -> str:
    """Run, or attach to, the run of checked inputs, as a Prefect flow. Returns the run's URI.

    Inputs are staged while the Prefect server starts; in `server` it is up, and flows report to it.
    Raises what `stage` and `drive` raise, and LaunchError when the server does not come up.
    """
    handler = signal.getsignal(signal.SIGTERM)

    # Prefect stores the parameters of a flow: it gets the settings, which the UI shows, and not
    # the tokenised prompts.
    @flow(
        name="retrace",
        flow_run_name="{config.trainer.run_name}",
        validate_parameters=False,
    )
    def retrace(config: RunConfig) -> str:
        _keep_sigterm(handler)
        with Artifacts(config.trainer.run_name, display.line) as artifacts:
            host = WorkerHost(begin_attempt, partial(_workers, display))
            drive(config, run, display, artifacts, host)
        return run.uri

    config = inputs.config
    use_settings(config.store)  # the workers inherit them
    with warnings_of("pipeline.store", display.line):
        display.phase("flow", "staging inputs")
        run = stage(inputs)
        if run.amended is not None:
            display.line(f"the run is amended: {run.amended}")
        display.phase("flow", "starting Prefect's server")
        with server:
            display.phase("flow", None)
            return retrace(config)


def _keep_sigterm(handler: Any) -> None:
    """Leave SIGTERM to the program that has a handler of its own: for the time of a flow Prefect
    takes its place, and restores it afterwards."""
    # Handlers belong to the main thread; in others Prefect sets none.
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _workers(
    display: Display, config: RunConfig, run: StagedRun, attempt: Attempt
) -> Iterator[Workers]:
    """The workers as processes; nothing of them is left after the block."""
    launch = config.launch
    overlap = config.trainer.max_staleness > 0
    threads = launch.threads_per_worker or threads_per_worker(
        attempt.rollout_workers, attempt.training_ranks, overlap
    )
    ranks, engines = attempt.training_ranks, attempt.rollout_workers
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    device = choose_device(config.trainer.device)
    pool = gpu_pool() if device == "cuda" else ()
    devices = devices_of(pool, ranks, engines, tp)
    number, restarts = attempt.number, launch.max_restarts
    stages = [
        rollout_stage(run.uri, number, engines, restarts, threads, devices[1:]),
        training_stage(run.uri, number, ranks, restarts, threads, devices[:1]),
    ]
    display.phase("workers", f"starting on {device}; logs in {log_folder(config)}")
    with local_workers(
        log_folder(config), stages, display.line, display.progress_folder
    ) as workers:
        yield workers
