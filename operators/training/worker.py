"""The program of a training rank.

    reads                           waits for (written by)           writes

    run.json, attempts/A.json
    last checkpoint, or policy 0
    ┌► steps/N/manifest.json        that, or A's stop (flow)
    │  own samples and routes
    │                               the other ranks, in every pass   steps/N/training.json (R2)
    │                                                                policies/N+1
    │                                                                steps/N/metrics.json
    └─ N = N+1                                                       checkpoints/N+1, if due

Only rank 0 polls the store. It broadcasts the result, so that all ranks take the same next action.
The flow waits for steps/N/metrics.json and rollout workers wait for policies/N+1; processes do not
call each other. A rank fetches routes while it computes the step. If staleness allows, it reads the
next step while it trains the current one.

After a restart from a checkpoint, steps that have metrics are trained again with their stored
samples, but their results are not written again.
"""

import logging
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from operators.load_errors import lasting_errors
from operators.ready import say_ready
from operators.training.agree import agreed, await_ranks, folder_of_node
from operators.training.background import Background
from operators.training.batches.ahead import Ahead
from operators.training.batches.step_data import StepData, layout_rules, load_step
from operators.training.finish import Began, StepFinisher
from operators.training.megatron import checkpoint, parallel
from operators.training.publish.exporter import Exporter
from operators.training.publish.publisher import Publisher, PublishOptions
from operators.training.rank import Rank, make_rank
from operators.training.retention import remove_expired
from operators.training.speed import find_devices
from operators.training.step import train_step
from pipeline import progress
from pipeline.config.keys import value_at
from pipeline.config.tree import RunConfig
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import weights_of
from pipeline.rl.custom import CUSTOM, custom_function, load_custom
from pipeline.run import keys
from pipeline.run.attempts import config_of, in_force, read_attempt
from pipeline.run.commit import read_data
from pipeline.run.description import RunDescription, changed, read_created
from pipeline.run.wait import WaitTimeoutError, wait_for_any
from pipeline.scratch import scratch_folder
from pipeline.store import Store, open_store
from pipeline.traces import open_manifest

logger = logging.getLogger(__name__)

_SLICE_S = 10.0
"""Seconds between checks for a failed background job while ranks wait for a manifest."""
_MAKER = "the flow, once all rollout workers are done,"
"""The writer of a manifest, for timeout messages."""


@dataclass
class TrainingLoop:
    """A training rank's loop over all steps."""

    store: Store
    attempt: int
    """Number of the attempt."""
    rank: Rank
    finisher: StepFinisher
    background: Background
    """The thread that writes policies and metrics."""
    checkpoints: Background
    """The thread that writes checkpoints. It is separate because a policy must not wait for a
    checkpoint."""
    ahead: Ahead
    """The reader of the next step."""

    def run(self, first_step: int) -> None:
        """Train until the run's last step, or until the attempt's stop object exists."""
        for step in range(first_step, self.rank.config.trainer.total_training_steps):
            started = time.monotonic()
            if not self._await_manifest(step):
                logger.info("stop object found: step %d is not trained", step)
                break
            logger.info("step %d: manifest after %.1f s", step, time.monotonic() - started)
            self._train(step, started, first=step == first_step)
        self.background.finish()
        self.checkpoints.finish()
        await_ranks()  # leaving the process group also waits for all ranks, but only briefly

    def _train(self, step: int, wait_began: float, first: bool) -> None:
        """Train and finish a sealed step; `first` is true in the first step of this attempt."""
        trainer = self.rank.config.trainer
        progress.say(f"step {step}: reading samples")
        started = time.monotonic()
        data = self.ahead.take(step)
        waited_s = time.monotonic() - started
        last = step + 1 == trainer.total_training_steps
        if trainer.max_staleness and not last:
            self.ahead.prepare(step + 1)
        with closing(data):
            kl_coef = self.finisher.kl_coefficient(step)
            trained = train_step(self.rank, data, waited_s, first, kl_coef)
        due = (step + 1) % trainer.save_freq == 0 or last
        self.finisher.finish(data, trained, Began(wait_began, started), due)
        if due and dist.get_rank() == 0:
            self.checkpoints.submit("removing old policies", self._remove_expired)

    def _remove_expired(self) -> None:
        trainer = self.rank.config.trainer
        remove_expired(self.store, trainer.save_freq, trainer.max_staleness)

    def _await_manifest(self, step: int) -> bool:
        """Wait until the step is sealed or the attempt is stopped; return whether it is sealed.

        Raises WaitTimeoutError on rank 0, which causes PeerError on the other ranks.
        """
        progress.say(f"waiting for the samples of step {step}")
        manifest = keys.manifest(step)
        wanted = [keys.stop(self.attempt), manifest]  # if both exist, the first takes precedence
        # The wait for the first step includes the start of the rollout engine.
        launch = self.rank.config.launch
        timeout_s = launch.start_timeout_s + launch.step_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            self.background.check()
            self.checkpoints.check()
            found = agreed(lambda: _look(self.store, wanted, deadline))
            if found is not None:
                return found == manifest


def run(run_uri: str, attempt_number: int) -> None:
    """Train until the run's last step or the attempt's stop object (see the module's diagram)."""
    store = open_store(run_uri)
    attempt = read_attempt(store, attempt_number)
    run = changed(read_created(store), attempt.changes)
    config = in_force(config_of(run), attempt)
    functions = _load_functions(store, run, config)
    limits = parallel.limits_of(config.launch)
    position = parallel.start(config.actor_rollout_ref.actor.megatron, limits)
    if dist.get_rank() != 0:  # rank 0 logs for all
        logging.getLogger().setLevel(logging.WARNING)
    progress.say("loading the model")
    with folder_of_node("model", lambda folder: fetch_model(store, folder)) as folder:
        with lasting_errors("loading the model into Megatron"):
            rank, model = make_rank(config, position, folder, functions)
        version = agreed(lambda: checkpoint.latest(store)) or 0
        if version:
            progress.say(f"loading the checkpoint of policy {version}")
            checkpoint.load(store, version, model, rank.critic_model)
            logger.info("continue from the checkpoint of policy %d", version)
        say_ready()
        records = config.actor_rollout_ref.actor.router_replay.records_routes
        weights = agreed(lambda: weights_of(store, version)) if records else None
        engines = (
            attempt.rollout_workers * config.actor_rollout_ref.rollout.tensor_model_parallel_size
        )
        devices = find_devices(attempt.training_ranks, engines, folder)
        with (
            scratch_folder("policy") as scratch,
            Background("policies") as background,
            Background("checkpoints") as checkpoints,
            closing(_reader(store, rank)) as ahead,
        ):
            exporter = Exporter(model, folder, config.store.policy_buffer_mib << 19)
            options = _publish_options(config, exporter.size)
            publisher = Publisher(store, exporter, folder, scratch, background, options)
            writer = checkpoint.CheckpointWriter(store, checkpoints, config.launch.step_timeout_s)
            finisher = StepFinisher(
                store, rank, model, publisher, writer, background, devices, weights, attempt_number
            )
            loop = TrainingLoop(
                store, attempt_number, rank, finisher, background, checkpoints, ahead
            )
            loop.run(version)
    parallel.leave()


def fetch_model(store: Store, folder: Path) -> None:
    """Fetch policy 0 into a scratch folder of this node."""
    fetch_policy(store, 0, folder, "set TMPDIR to a larger disk")


def _publish_options(config: RunConfig, size: int) -> PublishOptions:
    """Return the options for writing policies of `size` bytes."""
    return PublishOptions(
        room=config.store.policy_buffer_mib << 20,
        timeout_s=config.launch.step_timeout_s,
        every=config.store.policy_deltas.whole_every(size),
    )


def _load_functions(
    store: Store, run: RunDescription, config: RunConfig
) -> dict[str, Callable[..., Any]]:
    """Load users' estimators and losses from the run's staged files, keyed by setting.

    Raises CustomError if a file cannot be run or lacks the function, and StoreError.
    """
    functions = {}
    for key, kind in CUSTOM.items():
        named = custom_function(value_at(config, key))
        if named is not None:
            content = read_data(store, run.inputs.functions[key])
            functions[key] = load_custom(content, named.name, kind)
    return functions


def _reader(store: Store, rank: Rank) -> Ahead:
    """Create the reader of this rank's data for each step."""
    config, position = rank.config, rank.position
    rules = layout_rules(config, position.data_parallel)

    def load(step: int) -> StepData:
        sealed = open_manifest(store, step)
        return load_step(store, sealed, config, rules, position.dp_rank, rank.geometry)

    def is_sealed(step: int) -> bool:
        return store.size(keys.manifest(step)) is not None

    return Ahead(load, is_sealed)


def _look(store: Store, wanted: list[str], deadline: float) -> str | None:
    """Poll the store for up to _SLICE_S seconds; return the key that was found, or None.

    Raises WaitTimeoutError after the deadline.
    """
    left_s = max(0.0, deadline - time.monotonic())
    try:
        return wait_for_any(store, wanted, min(left_s, _SLICE_S), _MAKER)
    except WaitTimeoutError:
        if left_s <= _SLICE_S:
            raise
        return None


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that temporary folders are removed and logs are complete."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
