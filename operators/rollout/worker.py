"""The program of a rollout worker.

    consumes                          waits for (made by)                  makes
    run.json, attempts/A.json         –                                    –
    newest policy that its next       –                                    –
    step may need (starts the engine
    while the trainer starts)
    ┌► steps/N/plan.json        ┐     whichever is first, or A's stop
    │  steps/N/plan.KKKKK.json  │     (the flow)
    │  validations/V/plan.json  ┘
    │  policies/V/policy.json         that, or A's stop (the trainer)
    └─ own shards of the plan         –                                    steps/N/rollout/S.json
                                                                           validations/V/S.json

Processes do not call each other: the flow seals a step when all its shards exist, which unblocks
the trainer; the trainer's next policy, and the flow's next plan, unblock this worker. A restarted
worker skips sealed steps and committed shards and makes what is missing. Steps come before
validations, so that the trainer has work while a policy is validated. With dynamic sampling a step
may have more than one plan: until it is sealed, the worker waits for the next one and does nothing
else, as another step or a validation may need another policy.
"""

import logging
import time
from contextlib import closing
from dataclasses import dataclass

from operators.ready import say_ready
from operators.rollout.engine import RolloutEngine
from operators.rollout.prompts import Prompts, shards_of
from operators.rollout.scoring import RewardCode, Scorer
from operators.rollout.shard import ShardMaker, Task
from operators.rollout.types import RolloutError
from pipeline import progress
from pipeline.config.tree import RunConfig
from pipeline.run import keys
from pipeline.run.amendments import amended, read_amendments
from pipeline.run.attempts import Attempt, in_force, read_attempt
from pipeline.run.commit import read_data
from pipeline.run.description import read_created
from pipeline.run.plan import StepPlan, read_plan
from pipeline.run.planning import most_sub_plans
from pipeline.run.policy import fetch_policy
from pipeline.run.run_config import config_of
from pipeline.run.wait import wait_for_any
from pipeline.scratch import scratch_folder
from pipeline.store import Store, open_store
from pipeline.traces import Geometry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """The inputs of the run, which do not change during the worker's life."""

    config: RunConfig
    """The settings in force in the worker's attempt."""
    geometry: Geometry | None
    """None: a dense model."""
    prompts: Prompts
    val_prompts: Prompts | None
    """None: the run validates nothing."""
    code: RewardCode
    amendments: int
    """How many amendments of the run they are made with."""


@dataclass
class Worker:
    """A rollout worker with its engine and its remaining work."""

    store: Store
    index: int
    attempt: Attempt
    inputs: Inputs
    engine: RolloutEngine
    weights: str
    """Weights digest of the policy that the engine has loaded."""
    scorer: Scorer
    step: int
    """The first step that may still need shards of this worker."""
    validations: list[int]
    """Versions whose validation may still need shards of this worker, ascending."""
    sub_plan: int = 0
    """The first sub-plan of that step that may still need shards of this worker."""

    def run(self) -> None:
        """Make this worker's shards of every plan until the attempt's stop object exists."""
        maker = ShardMaker(
            store=self.store,
            engine=self.engine,
            scorer=self.scorer,
            geometry=self.inputs.geometry,
            worker=self.index,
            buffer_bytes=self.inputs.config.actor_rollout_ref.rollout.trace_buffer_mib << 20,
            amendments=self.inputs.amendments,
            compression=self.inputs.config.actor_rollout_ref.rollout.trace_compression,
        )
        while (task := self._next_task()) is not None and self._load(task.plan.policy_version):
            for shard in self._missing(task):
                if self._stopped():
                    break
                maker.make(task, shard, self.weights)
        log.info("stop object found: nothing more is made")

    def _next_task(self) -> Task | None:
        """Wait for the next plan with missing shards of this worker; None: stopped."""
        stop = keys.stop(self.attempt.number)
        while True:
            found = self._await_any([stop, *self._next_keys()])
            if found == stop:
                return None
            if found != keys.manifest(self.step):  # else its step is sealed, and the next is due
                return self._task(found)

    def _next_keys(self) -> list[str]:
        """The keys to wait for; the earliest in the list counts most."""
        total = self.inputs.config.trainer.total_training_steps
        while self.step < total and self._step_finished():
            self.step, self.sub_plan = self.step + 1, 0
        if self.sub_plan:
            return [keys.sub_plan(self.step, self.sub_plan), keys.manifest(self.step)]
        self.validations = [
            version
            for version in self.validations
            if not self._finished(keys.validation_plan(version))
        ]
        plans = [keys.plan(self.step)] if self.step < total else []
        return plans + [keys.validation_plan(version) for version in self.validations]

    def _step_finished(self) -> bool:
        """Whether a step is sealed, or all of this worker's shards of all its plans committed."""
        most = most_sub_plans(self.inputs.config)
        while not self._exists(keys.manifest(self.step)):
            if self.sub_plan == most:
                return True
            if not self._finished(keys.sub_plan(self.step, self.sub_plan)):
                return False
            self.sub_plan += 1
        return True

    def _await_any(self, wanted: list[str]) -> str:
        # Between two plans lie at most the other workers' part of a rollout and a training step,
        # and both may include a worker's start. The flow, which waits for each, gives up first.
        progress.say("waiting for the next step")
        launch = self.inputs.config.launch
        timeout_s = 2 * (launch.start_timeout_s + launch.step_timeout_s)
        return wait_for_any(self.store, wanted, timeout_s, "the flow")

    def _finished(self, plan_key: str) -> bool:
        """Whether a plan exists and all of this worker's shards are committed."""
        return self._exists(plan_key) and not self._missing(self._task(plan_key))

    def _task(self, plan_key: str) -> Task:
        plan = read_plan(self.store, plan_key)
        if isinstance(plan, StepPlan):
            return Task(plan, self.inputs.prompts)
        if self.inputs.val_prompts is None:
            raise RolloutError(f"{plan_key}: run.json names no validation prompts")
        return Task(plan, self.inputs.val_prompts)

    def _missing(self, task: Task) -> list[int]:
        own = shards_of(self.index, self.attempt.rollout_workers, task.plan.shards)
        return [shard for shard in own if not self._exists(task.plan.shard_key(shard))]

    def _load(self, version: int) -> bool:
        """Wait for a policy and load it; False: stopped while waiting."""
        if version == self.engine.version:
            return True
        progress.say(f"waiting for policy {version}")
        wanted = [keys.stop(self.attempt.number), keys.policy(version)]
        launch = self.inputs.config.launch
        timeout_s = launch.start_timeout_s + launch.step_timeout_s
        if wait_for_any(self.store, wanted, timeout_s, "the trainer") == wanted[0]:
            return False
        progress.say(f"loading policy {version}")
        started = time.monotonic()
        with scratch_folder("policy") as folder:
            weights = fetch_policy(self.store, version, folder)
            fetched = time.monotonic()
            self.engine.load(folder, version)
        self.weights = weights
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
    """Run rollout worker `index` of an attempt until it is stopped. See the module's diagram."""
    store = open_store(run_uri)
    attempt = read_attempt(store, attempt_number)
    if not 0 <= index < attempt.rollout_workers:
        raise RolloutError(
            f"--worker {index}: attempt {attempt_number} has rollout workers "
            f"0..{attempt.rollout_workers - 1}"
        )
    inputs = read_inputs(store, attempt)
    trainer = inputs.config.trainer
    step = first_open_step(store, trainer.total_training_steps)
    version = version_at_start(store, step, trainer.max_staleness)
    with start_scorer(inputs) as scorer:
        engine, weights = start_engine(store, inputs, version)
        with closing(engine):
            say_ready()
            validations = list(attempt.validations)
            Worker(store, index, attempt, inputs, engine, weights, scorer, step, validations).run()


def read_inputs(store: Store, attempt: Attempt) -> Inputs:
    """Read the run's inputs. Raises RolloutError for a run whose samples are there already."""
    amendments = read_amendments(store)
    run = amended(read_created(store), amendments)
    config, staged = in_force(config_of(run), attempt), run.inputs
    if config.actor_rollout_ref.actor.router_replay.replay_file is not None:
        raise RolloutError(
            "run.json names traces to replay (actor_rollout_ref.actor.router_replay.replay_file): "
            "such a run has no rollout workers"
        )
    function = config.custom_reward_function
    code = RewardCode(None)
    if staged.reward is not None and function is not None:
        code = RewardCode(read_data(store, staged.reward), function.name)
    val = staged.val_prompts
    return Inputs(
        config=config,
        geometry=run.geometry,
        prompts=Prompts.read(store, staged.prompts),
        val_prompts=None if val is None else Prompts.read(store, val),
        code=code,
        amendments=len(amendments),
    )


def start_scorer(inputs: Inputs) -> Scorer:
    """Start scoring in processes of its own; close it. Raises RewardError for unusable code."""
    config = inputs.config
    return Scorer(
        inputs.code, config.reward, config.launch.start_timeout_s, config.data.max_response_length
    )


def first_open_step(store: Store, total: int) -> int:
    """The first step without a manifest."""
    return next((s for s in range(total) if store.size(keys.manifest(s)) is None), total)


def version_at_start(store: Store, step: int, max_staleness: int) -> int:
    """The newest stored policy version that is not newer than the one `step` will use.

    The engine starts with it while the trainer starts: in a new run both load policy 0.
    """
    newest = max(0, step - max_staleness)
    for version in range(newest, 0, -1):
        if store.size(keys.policy(version)) is not None:
            return version
    return 0


def start_engine(store: Store, inputs: Inputs, version: int) -> tuple[RolloutEngine, str]:
    """Start an engine with a policy version; also return the digest of its weights."""
    progress.say(f"starting the engine with policy {version}")
    started = time.monotonic()
    config = inputs.config
    rollout = config.actor_rollout_ref.rollout
    with scratch_folder("policy") as folder:
        weights = fetch_policy(store, version, folder)
        engine = RolloutEngine(
            folder,
            rollout,
            rollout.enable_rollout_routing_replay,
            config.data.max_prompt_length + config.data.max_response_length,
            inputs.geometry,
            version,
        )
    seconds = time.monotonic() - started
    log.info("%s started with policy %d in %.1f s", engine.name, version, seconds)
    return engine, weights
