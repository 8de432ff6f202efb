"""The program of a training rank.

    consumes                        waits for (made by)              makes
    run.json, attempts/A.json       –                                –
    last checkpoint, or policy 0    –                                –
    ┌► steps/N/manifest.json        that, or A's stop (flow)         –
    │  own samples, own routes      –                                –
    │                               the other ranks, in every pass   steps/N/training.json (R2)
    │                                                                policies/N+1
    │                                                                checkpoints/N+1, if due
    └─ N = N + 1                                                     steps/N/metrics.json

Rank 0 alone polls the store and broadcasts the result, so that all ranks agree on what happens
next. steps/N/metrics.json and policies/N+1 unblock the processes that wait for them (the flow, the
rollout workers); processes do not call each other. Routes are fetched while the step computes, and
where staleness allows, the next step is read while this one is trained. After a restart from a
checkpoint, a step whose metrics exist is trained again from the store, but nothing of it is
written.
"""

import logging
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch.distributed as dist

from operators.ready import say_ready
from operators.training.agree import agreed, folder_of_node
from operators.training.batches.ahead import Ahead
from operators.training.batches.step_data import StepData, layout_rules, load_step
from operators.training.finish import Began, StepFinisher, kl_coefficient
from operators.training.megatron import checkpoint, parallel
from operators.training.rank import Rank, make_rank
from operators.training.retention import remove_expired
from operators.training.speed import find_devices
from operators.training.step import train_step
from pipeline import progress
from pipeline.config.keys import value_at
from pipeline.config.tree import RunConfig
from pipeline.rl.custom import CUSTOM, custom_function, load_custom
from pipeline.run import keys
from pipeline.run.amendments import description_now, read_amendments
from pipeline.run.attempts import in_force, read_attempt
from pipeline.run.commit import read_data
from pipeline.run.description import RunDescription
from pipeline.run.policy import fetch_policy, weights_of
from pipeline.run.run_config import config_of
from pipeline.run.wait import WaitTimeoutError, wait_for_any
from pipeline.store import Store, open_store
from pipeline.traces import open_manifest

logger = logging.getLogger(__name__)

_SLICE_S = 60.0
"""How often rank 0 broadcasts that nothing has been found yet: the process group gives up on a rank
that is silent for longer than the group's timeout, which is shorter than a long rollout."""
_TIMEOUT = "timeout"


@dataclass
class TrainingLoop:
    """A training rank with its model, over all steps."""

    store: Store
    attempt: int
    """Number of the attempt."""
    rank: Rank
    finisher: StepFinisher
    ahead: Ahead

    def run(self, first_step: int) -> None:
        """Train until the run's last step or the attempt's stop object."""
        for step in range(first_step, self.rank.config.trainer.total_training_steps):
            started = time.monotonic()
            if not self._await_manifest(step):
                logger.info("stop object found: step %d is not trained", step)
                break
            logger.info("step %d: manifest after %.1f s", step, time.monotonic() - started)
            self._train(step, started, first=step == first_step)

    def _train(self, step: int, wait_began: float, first: bool) -> None:
        """Train and finish a sealed step; `first`: of this attempt."""
        trainer = self.rank.config.trainer
        progress.say(f"step {step}: reading samples")
        started = time.monotonic()
        data = self.ahead.take(step)
        waited_s = time.monotonic() - started
        last = step + 1 == trainer.total_training_steps
        if trainer.max_staleness and not last:
            self.ahead.prepare(step + 1)
        with closing(data):
            kl_coef = agreed(lambda: kl_coefficient(self.store, self.rank.config, step))
            trained = train_step(self.rank, data, waited_s, first, kl_coef)
        due = (step + 1) % trainer.save_freq == 0 or last
        self.finisher.finish(data, trained, Began(wait_began, started), due)
        if due and dist.get_rank() == 0:
            remove_expired(self.store, trainer.save_freq, trainer.max_staleness)

    def _await_manifest(self, step: int) -> bool:
        """Wait; True when the step is sealed, False when the attempt was stopped first.

        Raises WaitTimeoutError on every rank.
        """
        progress.say(f"waiting for the samples of step {step}")
        manifest = keys.manifest(step)
        wanted = [keys.stop(self.attempt), manifest]  # if both exist, the first counts
        # The first step includes the start of the rollout engine.
        launch = self.rank.config.launch
        timeout_s = launch.start_timeout_s + launch.step_timeout_s
        deadline = time.monotonic() + timeout_s
        while True:
            found = agreed(lambda: _look(self.store, wanted, deadline))
            if found == _TIMEOUT:
                raise WaitTimeoutError(
                    f"waited {timeout_s:.0f} s for {' or '.join(wanted)} in {self.store.uri}; the "
                    "flow should have made it when the rollout was complete: look at the rollout "
                    "workers' logs, or raise launch.step_timeout_s"
                )
            if found is not None:
                return found == manifest


def run(run_uri: str, attempt_number: int) -> None:
    """Train until the run's last step or the attempt's stop object. See the module's diagram."""
    store = open_store(run_uri)
    attempt = read_attempt(store, attempt_number)
    amendments = len(read_amendments(store))
    run = description_now(store)
    config = in_force(config_of(run), attempt)
    functions = _load_functions(store, run, config)
    position = parallel.start(config.actor_rollout_ref.actor.megatron)
    if dist.get_rank() != 0:  # rank 0 logs for all
        logging.getLogger().setLevel(logging.WARNING)
    progress.say("loading the model")
    with folder_of_node("model", lambda folder: fetch_policy(store, 0, folder)) as folder:
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
        finisher = StepFinisher(store, rank, model, folder, devices, weights, amendments)
        with closing(_reader(store, rank)) as ahead:
            TrainingLoop(store, attempt_number, rank, finisher, ahead).run(version)
    parallel.leave()


def _load_functions(
    store: Store, run: RunDescription, config: RunConfig
) -> dict[str, Callable[..., Any]]:
    """Users' estimators and losses, from the files that were staged with the run.

    Raises CustomError for a file that cannot be run or has no such function; StoreError.
    """
    functions = {}
    for key, kind in CUSTOM.items():
        named = custom_function(value_at(config, key))
        if named is not None:
            content = read_data(store, run.inputs.functions[key])
            functions[key] = load_custom(content, named.name, kind)
    return functions


def _reader(store: Store, rank: Rank) -> Ahead:
    """Make the reader of this rank's share of steps."""
    config, position = rank.config, rank.position
    rules = layout_rules(config, position.data_parallel)

    def load(step: int) -> StepData:
        sealed = open_manifest(store, step)
        return load_step(store, sealed, config, rules, position.dp_rank, rank.geometry)

    def is_sealed(step: int) -> bool:
        return store.size(keys.manifest(step)) is not None

    return Ahead(load, is_sealed)


def _look(store: Store, wanted: list[str], deadline: float) -> str | None:
    """Poll the store for a slice of time; None: nothing found yet."""
    left_s = deadline - time.monotonic()
    try:
        return wait_for_any(store, wanted, max(0.0, min(left_s, _SLICE_S)), "the flow")
    except WaitTimeoutError:
        return _TIMEOUT if left_s <= _SLICE_S else None


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that temporary folders are removed and logs complete."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)
