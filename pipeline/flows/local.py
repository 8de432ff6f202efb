"""The flow of a run whose workers are processes on this machine."""

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
from pipeline.flows.drive import drive
from pipeline.hardware import gpu_pool
from pipeline.inputs.checked import CheckedInputs
from pipeline.inputs.stage import StagedRun, stage, try_staged_reward
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
from pipeline.run.attempts import Attempt, Claim
from pipeline.store.settings import use_settings


def run_flow(
    inputs: CheckedInputs,
    claim: Claim,
    display: Display,
    server: AbstractContextManager[None],
) -> str:
    """Start a run from checked inputs as a Prefect flow, or attach to it; return the run's URI.

    Args:
        inputs: The checked inputs. They are staged while the Prefect server starts.
        claim: The attempt, which this process owns. All earlier attempts have ended.
        display: Shows the run's progress.
        server: The context from `prefect_server`; while it is entered, flows report to the server.

    Raises:
        InputError: An input is invalid.
        LaunchError: The server or the workers cannot be started, or workers fail too often.
        WaitTimeoutError: An object does not appear in time.
        StoreError: The store fails.
        TraceError: A trace is invalid.
    """
    handler = signal.getsignal(signal.SIGTERM)

    # Prefect stores a flow's parameters. The flow therefore receives the settings, which the UI
    # shows, but not the tokenised prompts.
    @flow(
        name="retrace",
        flow_run_name="{config.trainer.run_name}",
        validate_parameters=False,
    )
    def retrace(config: RunConfig) -> str:
        _keep_sigterm(handler)
        with Artifacts(config.trainer.run_name, display.line) as artifacts:
            drive(run, claim, display, artifacts, partial(_workers, display, hidden))
        return run.uri

    config = inputs.config
    hidden = int(inputs.model.config["hidden_size"])
    use_settings(config.store)  # the workers inherit these environment variables
    with warnings_of("pipeline.store", display.line):
        display.phase("flow", "trying the reward function")
        if note := try_staged_reward(inputs):
            display.line(f"note: {note}")
        display.phase("flow", "staging inputs")
        run = stage(inputs)
        if claim.attempt.reason:
            display.line(f"the run is changed: {claim.attempt.reason}")
        display.phase("flow", "starting Prefect's server")
        with server:
            display.phase("flow", None)
            return retrace(config)


def _keep_sigterm(handler: Any) -> None:
    """Restore the program's own handler for SIGTERM, which Prefect replaces during a flow."""
    # Only the main thread can set handlers, so Prefect does not replace it in other threads.
    if callable(handler) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _workers(
    display: Display, hidden: int, config: RunConfig, run: StagedRun, attempt: Attempt
) -> Iterator[Workers]:
    """Start the workers as processes, and end them after the block.

    `hidden` is the width of the model's hidden states.
    """
    launch = config.launch
    overlap = config.trainer.max_staleness > 0
    threads = launch.threads_per_worker or threads_per_worker(
        attempt.rollout_workers, attempt.training_ranks, overlap, hidden
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
