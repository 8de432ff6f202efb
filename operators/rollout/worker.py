"""The program of a rollout worker.

    consumes                          waits for (made by)                  makes
    run.json, attempts/A.json         –                                    –
    newest policy that its next       –                                    –
    step may need (starts the engine
    while the trainer starts)
    ┌► steps/N/plan.json        ┐     whichever is first, or A's stop
    │  validations/V/plan.json  ┘     (the flow)
    │  policies/V/policy.json         that, or A's stop (the trainer)
    └─ own shards of the plan         –                                    steps/N/rollout/S.json
                                                                           validations/V/S.json

Nobody is called: the flow seals a step when all its shards are there, and that unblocks the
trainer; the trainer's next policy, and the flow's next plan, unblock this worker. A worker that
comes back passes over sealed steps and committed shards and makes what is missing. Steps go before
validations, so that the trainer has work while a policy is validated.
"""

import logging
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from operators.ready import say_ready
from operators.rollout.engine import RolloutEngine
from operators.rollout.prompts import Prompts, shards_of
from operators.rollout.records import RolloutError
from operators.rollout.scoring import Scorer
from operators.rollout.shard import Task, make_shard
from pipeline.config.attempt import Attempt
from pipeline.config.tree import RunConfig
from pipeline.rl.rewards import load_reward
from pipeline.store import Store, keys, open_store
from pipeline.store.commit import DataFile, read_commit, read_data
from pipeline.store.policy import fetch_policy
from pipeline.store.wait import wait_for_any
from pipeline.traces import Geometry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """What run.json says; it does not change while the worker lives."""

    config: RunConfig
    geometry: Geometry | None
    """None: a dense model."""
    prompts: Prompts
    val_prompts: Prompts | None
    """None: the run validates nothing."""
    scorer: Scorer


@dataclass
class Worker:
    """A rollout worker with its engine, and what it still has to make."""

    store: Store
    index: int
    attempt: Attempt
    inputs: Inputs
    engine: RolloutEngine
    step: int
    """The first step that may still want something of this worker."""
    validations: list[int]
    """Versions whose validation may still want something of this worker, ascending."""

    def run(self) -> None:
        """Make what the plans ask for until the attempt's stop object is there."""
        while (task := self._next_task()) is not None and self._load(task.version):
            for shard in self._missing(task):
                if self._stopped():
                    break
                make_shard(
                    self.store,
                    self.engine,
                    self.inputs.scorer,
                    self.inputs.geometry,
                    task,
                    shard,
                    self.index,
                    self.attempt.trace_buffer_mib << 20,
                )
        log.info("stop object found: nothing more is made")

    def _next_task(self) -> Task | None:
        """Wait for the next plan that wants something of this worker; None: stopped."""
        total = self.attempt.total_training_steps
        while self.step < total and self._finished(keys.plan(self.step)):
            self.step += 1
        self.validations = [
            version
            for version in self.validations
            if not self._finished(keys.validation_plan(version))
        ]
        wanted = [keys.stop(self.attempt.number)]
        if self.step < total:
            wanted.append(keys.plan(self.step))
        wanted.extend(keys.validation_plan(version) for version in self.validations)
        # Between two plans there are at most the others' share of a rollout and a training step,
        # and both may have to start a worker. The flow, which waits for each, gives up first.
        timeout_s = 2 * (self.attempt.start_timeout_s + self.attempt.step_timeout_s)
        found = wait_for_any(self.store, wanted, timeout_s, "the flow")
        return None if found == wanted[0] else self._task(found)

    def _finished(self, plan_key: str) -> bool:
        """Whether a plan is there and all of this worker's shards are committed."""
        if plan_key == keys.plan(self.step) and self._exists(keys.manifest(self.step)):
            return True
        return self._exists(plan_key) and not self._missing(self._task(plan_key))

    def _task(self, plan_key: str) -> Task:
        plan = read_commit(self.store, plan_key)
        if plan_key == keys.plan(self.step):
            return Task(plan, False, self.inputs.prompts)
        if self.inputs.val_prompts is None:
            raise RolloutError(f"{plan_key}: run.json names no validation prompts")
        return Task(plan, True, self.inputs.val_prompts)

    def _missing(self, task: Task) -> list[int]:
        own = shards_of(self.index, self.attempt.rollout_workers, task.plan["shards"])
        return [shard for shard in own if not self._exists(task.key(shard))]

    def _load(self, version: int) -> bool:
        """Load a policy when it is there; False: stopped while waiting."""
        if version == self.engine.version:
            return True
        wanted = [keys.stop(self.attempt.number), keys.policy(version)]
        timeout_s = self.attempt.start_timeout_s + self.attempt.step_timeout_s
        if wait_for_any(self.store, wanted, timeout_s, "the trainer") == wanted[0]:
            return False
        started = time.monotonic()
        with TemporaryDirectory(prefix="retrace-policy-") as folder:
            fetch_policy(self.store, version, Path(folder))
            fetched = time.monotonic()
            self.engine.load(Path(folder), version)
        log.info(
            "policy %d loaded: %.1f s to fetch, %.1f s to load",
            version,
            fetched - started,
            time.monotonic() - fetched,
        )
        return True

    def _stopped(self) -> bool:
        return self._exists(keys.stop(self.attempt.number))

    def _exists(self, key: str) -> bool:
        return self.store.size(key) is not None


def run(run_uri: str, index: int, attempt_number: int) -> None:
    """Be rollout worker `index` of an attempt until it is stopped. See the module's drawing."""
    store = open_store(run_uri)
    attempt = Attempt.of_body(read_commit(store, keys.attempt(attempt_number)))
    if not 0 <= index < attempt.rollout_workers:
        raise RolloutError(
            f"--worker {index}: attempt {attempt_number} has rollout workers "
            f"0..{attempt.rollout_workers - 1}"
        )
    inputs = read_inputs(store)
    step = first_open_step(store, attempt.total_training_steps)
    version = version_at_start(store, step, inputs.config.trainer.max_staleness)
    with closing(start_engine(store, inputs, attempt, version)) as engine:
        say_ready()
        Worker(store, index, attempt, inputs, engine, step, list(attempt.validations)).run()


def read_inputs(store: Store) -> Inputs:
    """What run.json says. Raises RolloutError when it names no prompts or reward function."""
    body = read_commit(store, keys.run_json())
    config = RunConfig.model_validate(body["config"])
    files, geometry = body["inputs"], body["geometry"]
    reward_function = config.custom_reward_function
    if files["prompts"] is None or files["reward"] is None or reward_function is None:
        raise RolloutError(
            "run.json names no prompts or no reward function: a run that replays a trace set "
            "(router_replay.replay_file) has no rollout workers"
        )
    val = files["val_prompts"]
    return Inputs(
        config=config,
        geometry=geometry
        and Geometry(geometry["experts"], geometry["topk"], tuple(geometry["layers"])),
        prompts=Prompts.read(store, files["prompts"]),
        val_prompts=None if val is None else Prompts.read(store, val),
        scorer=Scorer(
            load_reward(read_data(store, DataFile(**files["reward"])), reward_function.name),
            mask_errors=config.reward.on_error == "mask",
        ),
    )


def first_open_step(store: Store, total: int) -> int:
    """The first step without a manifest."""
    return next((s for s in range(total) if store.size(keys.manifest(s)) is None), total)


def version_at_start(store: Store, step: int, max_staleness: int) -> int:
    """The newest policy version that is there and not newer than what `step` will use.

    The engine starts with it while the trainer starts: in a new run both load policy 0.
    """
    newest = max(0, step - max_staleness)
    for version in range(newest, 0, -1):
        if store.size(keys.policy(version)) is not None:
            return version
    return 0


def start_engine(store: Store, inputs: Inputs, attempt: Attempt, version: int) -> RolloutEngine:
    """The engine with a policy version loaded."""
    started = time.monotonic()
    config = inputs.config
    rollout = config.actor_rollout_ref.rollout.model_copy(
        update={
            "gpu_memory_utilization": attempt.gpu_memory_utilization,
            "cpu_kv_cache_gib": attempt.cpu_kv_cache_gib,
        }
    )
    with TemporaryDirectory(prefix="retrace-policy-") as folder:
        fetch_policy(store, version, Path(folder))
        engine = RolloutEngine(
            Path(folder),
            rollout,
            rollout.enable_rollout_routing_replay,
            config.data.max_prompt_length + config.data.max_response_length,
            inputs.geometry,
            version,
        )
    seconds = time.monotonic() - started
    log.info("%s started with policy %d in %.1f s", engine.name, version, seconds)
    return engine
