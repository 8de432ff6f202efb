"""The program of a training rank.

    consumes                        waits for (made by)              makes
    run.json, attempts/A.json       –                                –
    last checkpoint, or policy 0    –                                –
    ┌► steps/N/manifest.json        that, or A's stop (flow)         –
    │  own samples, own routes      –                                –
    │                               the other ranks, in every pass   steps/N/training/*.json (R2)
    │                                                                policies/N+1
    │                                                                checkpoints/N+1, if due
    └─ N = N + 1                                                     steps/N/metrics.json

Rank 0 alone waits at the store and tells the others, so all ranks agree on what happens next.
Whoever waits for steps/N/metrics.json or policies/N+1 (the flow, the rollout workers) is unblocked
by them; nobody is called. Routes are fetched while the step computes, and where staleness allows,
the next step is read while this one is trained. A step whose metrics are there already (we came
back from a checkpoint) is trained again from the store, but nothing of it is written.
"""

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import torch.distributed as dist

from operators.ready import say_ready
from operators.training import checkpoint, parallel
from operators.training.agree import agreed
from operators.training.ahead import Ahead
from operators.training.data import StepData, layout_rules, load_step
from operators.training.finish import finish_step
from operators.training.model import TrainedModel
from operators.training.parallel import Ranks
from operators.training.rank import Rank, make_rank
from operators.training.retention import prune
from operators.training.step import train_step
from pipeline.config.attempt import Attempt
from pipeline.config.tree import RunConfig
from pipeline.store import Store, keys, open_store
from pipeline.store.commit import read_commit
from pipeline.store.policy import fetch_policy
from pipeline.store.wait import WaitTimeoutError, wait_for_any
from pipeline.traces import open_manifest

logger = logging.getLogger(__name__)

_SLICE_S = 60.0
"""Rank 0 tells the others this often that there is nothing yet: the process group gives up on a
rank that is silent for longer than its own timeout, which is shorter than a long rollout."""
_TIMEOUT = "timeout"


def run(run_uri: str, attempt_number: int) -> None:
    """Train until the run's last step or the attempt's stop object. See the module's drawing."""
    store = open_store(run_uri)
    config = RunConfig.model_validate(read_commit(store, keys.run_json())["config"])
    attempt = Attempt.of_body(read_commit(store, keys.attempt(attempt_number)))
    ranks = parallel.start(config.actor_rollout_ref.actor.megatron)
    _only_rank_0_logs_info(ranks)
    with _policy_folder(store, ranks) as folder:
        rank, model = make_rank(config, ranks, folder)
        version = agreed(lambda: checkpoint.latest(store)) or 0
        if version:
            checkpoint.load(store, version, model)
            logger.info("continue from the checkpoint of policy %d", version)
        say_ready()
        drifts = 0
        rules = layout_rules(config, rank.place.data_parallel)

        def load(step: int) -> StepData:
            sealed = open_manifest(store, step)
            return load_step(store, sealed, config, rules, rank.place.dp_rank, rank.geometry)

        def is_sealed(step: int) -> bool:
            return store.size(keys.manifest(step)) is not None

        with closing(Ahead(load, is_sealed)) as ahead:
            for step in range(version, attempt.total_training_steps):
                waited = time.monotonic()
                if not _await_manifest(store, attempt, step):
                    logger.info("stop object found: step %d is not trained", step)
                    break
                logger.info("step %d: manifest after %.1f s", step, time.monotonic() - waited)
                drifts = _one_step(store, rank, model, folder, attempt, ahead, step, drifts)
    parallel.leave()


def _one_step(
    store: Store,
    rank: Rank,
    model: TrainedModel,
    folder: Path,
    attempt: Attempt,
    ahead: Ahead,
    step: int,
    drifts: int,
) -> int:
    """Train and finish a step; see finish_step for `drifts`."""
    started = time.monotonic()
    data = ahead.take(step)
    waited_s = time.monotonic() - started
    if rank.config.trainer.max_staleness and step + 1 < attempt.total_training_steps:
        ahead.prepare(step + 1)
    with closing(data):
        trained = train_step(rank, data, waited_s)
    due = (step + 1) % attempt.save_freq == 0 or step + 1 == attempt.total_training_steps
    drifts = finish_step(store, rank, model, folder, data, trained, started, due, drifts)
    if due and dist.get_rank() == 0:
        prune(store, attempt.save_freq, rank.config.trainer.max_staleness)
    return drifts


def _await_manifest(store: Store, attempt: Attempt, step: int) -> bool:
    """True when the step is sealed, False when the attempt was stopped first.

    Raises WaitTimeoutError on every rank.
    """
    manifest = keys.manifest(step)
    wanted = [keys.stop(attempt.number), manifest]  # of both, the first
    # Before the first step the rollout engine starts, too.
    timeout_s = attempt.start_timeout_s + attempt.step_timeout_s
    deadline = time.monotonic() + timeout_s
    while True:
        found = agreed(lambda: _look(store, wanted, deadline))
        if found == _TIMEOUT:
            raise WaitTimeoutError(
                f"waited {timeout_s:.0f} s for {' or '.join(wanted)} in {store.uri}; the flow "
                "should have made it when the rollout was complete: look at the rollout workers' "
                "logs, or raise launch.step_timeout_s"
            )
        if found is not None:
            return found == manifest


def _look(store: Store, wanted: list[str], deadline: float) -> str | None:
    """Look for a slice of time; None: nothing yet."""
    left_s = deadline - time.monotonic()
    try:
        return wait_for_any(store, wanted, max(0.0, min(left_s, _SLICE_S)), "the flow")
    except WaitTimeoutError:
        return _TIMEOUT if left_s <= _SLICE_S else None


@contextmanager
def _policy_folder(store: Store, ranks: Ranks) -> Iterator[Path]:
    """Policy 0 on this node's disk, downloaded once per node."""
    with TemporaryDirectory(prefix="retrace-model-") as own:
        if ranks.local_rank == 0:
            fetch_policy(store, 0, Path(own))
        node = os.environ.get("GROUP_RANK", "0")
        folders: list[Any] = [None] * ranks.world
        dist.all_gather_object(folders, (node, ranks.local_rank, own))
        yield next(Path(path) for n, local_rank, path in folders if (n, local_rank) == (node, 0))
        dist.barrier()


def exit_on_sigterm() -> None:
    """Turn SIGTERM into SystemExit, so that temporary folders go and logs are complete."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def _only_rank_0_logs_info(ranks: Ranks) -> None:
    if ranks.rank != 0:
        logging.getLogger().setLevel(logging.WARNING)
