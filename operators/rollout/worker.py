"""The program of a rollout worker.

    reads                             waits for (written by)               writes

    run.json, attempts/A.json         –                                    –

    newest policy that the worker's   –                                    –
    next step may need (the engine
    starts while the trainer starts)

    ┌► steps/N/plan.json        ┐     the first of these, or A's stop
    │  steps/N/plan.KKKKK.json  │     (the flow)
    │  validations/V/plan.json  ┘
    │  policies/V/policy.json         this, or A's stop (the trainer)
    │  policies/V+1, ahead of use     (a thread, while the engine generates)
    └─ own shards of the plan         –                                    steps/N/rollout/S.json
                                                                           validations/V/S.json

Processes do not call each other. The flow seals a step when all its shards exist, and the manifest
unblocks the trainer. The trainer's next policy version and the flow's next plan unblock this
worker. A restarted worker skips sealed steps and committed shards, and generates the missing
shards.

Steps take precedence over validations, so that the trainer has work while a policy version is
validated. With dynamic sampling a step may have more than one plan. Until that step is sealed, the
worker waits for the step's next plan and does no other work, because a validation or another step
may need a different policy version.
"""

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field

from operators.load_errors import lasting_errors
from operators.ready import say_ready
from operators.rollout.engine import RolloutEngine
from operators.rollout.prompts import shards_of
from operators.rollout.scoring import Scorer
from operators.rollout.shard import ShardMaker, Task
from operators.rollout.types import RolloutError
from pipeline import progress
from pipeline.config.tree import RunConfig
from pipeline.policies.cache import PolicyCache, PolicyTimes, cache_folder
from pipeline.policies.fetch import Held
from pipeline.policies.prefetch import Prefetch
from pipeline.policies.weights import Tensor
from pipeline.run import keys
from pipeline.run.attempts import Attempt, config_of, in_force, read_attempt
from pipeline.run.commit import read_data
from pipeline.run.description import changed, read_created
from pipeline.run.plan import StepPlan, read_plan
from pipeline.run.planning import most_sub_plans, policy_version
from pipeline.run.prompt_table import StoredPrompts
from pipeline.run.wait import wait_for_any
from pipeline.scoring.code import RewardCode
from pipeline.scoring.trial import COLUMNS, Question, tried_rows, try_reward
from pipeline.store import Store, open_store
from pipeline.traces import Geometry

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inputs:
    """The inputs of the run, which do not change while the worker runs."""

    config: RunConfig
    """The settings in force in the worker's attempt."""
    geometry: Geometry | None
    """The model's geometry; None for a dense model."""
    prompts: StoredPrompts
    val_prompts: StoredPrompts | None
    """The validation prompts; None if the run does not validate."""
    code: RewardCode
    attempt: int
    """The number of the attempt that uses these inputs."""


@dataclass
class Worker:
    """A rollout worker with its engine and its remaining work."""

    store: Store
    index: int
    attempt: Attempt
    inputs: Inputs
    engine: RolloutEngine
    weights: str
    """The weights digest of the policy version that the engine has loaded."""
    policies: PolicyCache
    ahead: Prefetch
    scorer: Scorer
    step: int
    """The first step that may still need shards from this worker."""
    validations: list[int]
    """The policy versions whose validation may still need shards from this worker, ascending."""
    sub_plan: int = 0
    """The first sub-plan of `step` that may still need shards from this worker."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors of the loaded policy version; empty if no share lists them."""
    times: PolicyTimes = field(default_factory=PolicyTimes)
    """Time spent loading policy versions that is not yet recorded in a shard's commit."""

    def run(self) -> None:
        """Generate this worker's shards for every plan until the attempt's stop object exists."""
        maker = ShardMaker(
            store=self.store,
            engine=self.engine,
            scorer=self.scorer,
            geometry=self.inputs.geometry,
            worker=self.index,
            buffer_bytes=self.inputs.config.actor_rollout_ref.rollout.trace_buffer_mib << 20,
            attempt=self.inputs.attempt,
            compression=self.inputs.config.actor_rollout_ref.rollout.trace_compression,
        )
        while (task := self._next_task()) is not None and self._load(task.plan.policy_version):
            for shard in self._missing(task):
                if self._stopped():
                    break
                maker.make(task, shard, self.weights, self.times)
                self.times = PolicyTimes()
        log.info("stop object found: the worker ends")

    def _next_task(self) -> Task | None:
        """Wait for the next plan that still needs shards from this worker.

        Returns None if the attempt is stopped.
        """
        stop = keys.stop(self.attempt.number)
        while True:
            found = self._await_any([stop, *self._next_keys()])
            if found == stop:
                return None
            if found == keys.manifest(self.step):
                continue  # the step is sealed; wait for the next step's plan
            task = self._task(found)
            if self._missing(task):
                return task

    def _next_keys(self) -> list[str]:
        """Return the keys to wait for; earlier keys in the list take precedence."""
        total = self.inputs.config.trainer.total_training_steps
        while self.step < total and self._step_finished():
            self.step, self.sub_plan = self.step + 1, 0
        # The worker may skip versions: if an attempt with fewer workers planned a step, this worker
        # may have no shard in that step.
        self.policies.needs(policy_version(self.step, self.inputs.config.trainer.max_staleness))
        if self.sub_plan:
            return [keys.sub_plan(self.step, self.sub_plan), keys.manifest(self.step)]
        # The flow plans the validation of version v once step v - 1 is trained, so it has planned
        # step v - 1 by then. A worker that waits for the plan of step N therefore looks only for
        # validations of versions up to N.
        due = [version for version in self.validations if version <= self.step]
        finished = {one for one in due if self._finished(keys.validation_plan(one))}
        self.validations = [one for one in self.validations if one not in finished]
        plans = [keys.plan(self.step)] if self.step < total else []
        return plans + [keys.validation_plan(one) for one in due if one not in finished]

    def _step_finished(self) -> bool:
        """Return whether `step` is sealed, or needs no more shards from this worker.

        Advances `sub_plan` past finished sub-plans.
        """
        most = most_sub_plans(self.inputs.config)
        while not self._exists(keys.manifest(self.step)):
            if self.sub_plan == most:
                return True
            if not self._finished(keys.sub_plan(self.step, self.sub_plan)):
                return False
            self.sub_plan += 1
        return True

    def _await_any(self, wanted: list[str]) -> str:
        # Between two plans, the other workers may still have to finish their part of a rollout, and
        # the trainer may have to train a step; each of these may include a worker's start. The flow
        # limits the two times separately, so it times out first.
        progress.say("waiting for the next step")
        launch = self.inputs.config.launch
        timeout_s = 2 * (launch.start_timeout_s + launch.step_timeout_s)
        return wait_for_any(self.store, wanted, timeout_s, "the flow")

    def _finished(self, plan_key: str) -> bool:
        """Return whether a plan exists and all of this worker's shards in it are committed."""
        return self._exists(plan_key) and not self._missing(self._task(plan_key))

    def _task(self, plan_key: str) -> Task:
        plan = read_plan(self.store, plan_key)
        if isinstance(plan, StepPlan):
            return Task(plan, self.inputs.prompts)
        if self.inputs.val_prompts is None:
            raise RolloutError(
                f"{plan_key}: found a validation plan, but run.json names no validation prompts"
            )
        return Task(plan, self.inputs.val_prompts)

    def _missing(self, task: Task) -> list[int]:
        own = shards_of(self.index, self.attempt.rollout_workers, task.plan.shards)
        return [shard for shard in own if not self._exists(task.plan.shard_key(shard))]

    def _load(self, version: int) -> bool:
        """Wait for a policy version and load it; return False if the attempt was stopped first."""
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
        with self.policies.held(version) as held:
            fetched = time.monotonic()
            changed = self._changed(held)
            self.engine.load(held.folder, version, changed)
        loaded = time.monotonic()
        self.weights, self.tensors = held.weights, held.tensors
        took = self.policies.loaded(version)
        self.times = PolicyTimes(self.times.fetch + took, self.times.stall + loaded - started)
        self.ahead.fetch(version + 1)
        log.info(
            "policy %d loaded (changed tensors: %s of %d); fetching took %.1f s, of which the "
            "engine waited for %.1f s; loading took %.1f s",
            version,
            "any" if changed is None else len(changed),
            len(held.tensors),
            took,
            fetched - started,
            loaded - fetched,
        )
        return True

    def _changed(self, held: Held) -> set[str] | None:
        """Return the names of tensors that differ from the loaded version; None if unknown."""
        if not self.tensors or not held.tensors:
            return None
        return {name for name, of in held.tensors.items() if of != self.tensors.get(name)}

    def _stopped(self) -> bool:
        return self._exists(keys.stop(self.attempt.number))

    def _exists(self, key: str) -> bool:
        return self.store.size(key) is not None


def run(run_uri: str, index: int, attempt_number: int) -> None:
    """Run a rollout worker of an attempt until it is stopped. See the module's diagram.

    Args:
        run_uri: The URI of the run's root.
        index: The worker's index, counted from 0.
        attempt_number: The number of the attempt.

    Raises:
        RolloutError: The attempt has no worker with this index, or the rollout failed.
    """
    store = open_store(run_uri)
    attempt = read_attempt(store, attempt_number)
    if not 0 <= index < attempt.rollout_workers:
        raise RolloutError(
            f"--worker {index}: expected 0..{attempt.rollout_workers - 1}, the rollout workers of "
            f"attempt {attempt_number}"
        )
    inputs = read_inputs(store, attempt)
    trainer = inputs.config.trainer
    step = first_open_step(store, trainer.total_training_steps)
    version = version_at_start(store, step, trainer.max_staleness)
    if index == 0 and step == 0:
        _try_reward(inputs)
    root = cache_folder(inputs.config.store.policy_cache)
    with start_scorer(inputs) as scorer, closing(PolicyCache(store, root)) as policies:
        engine, held = start_engine(policies, inputs, version)
        with closing(engine), closing(Prefetch(store, policies)) as ahead:
            say_ready()
            ahead.fetch(version + 1)
            Worker(
                store=store,
                index=index,
                attempt=attempt,
                inputs=inputs,
                engine=engine,
                weights=held.weights,
                tensors=held.tensors,
                policies=policies,
                ahead=ahead,
                scorer=scorer,
                step=step,
                validations=list(attempt.validations),
            ).run()


def read_inputs(store: Store, attempt: Attempt) -> Inputs:
    """Read the run's inputs. Raises RolloutError if the run replays recorded samples."""
    run = changed(read_created(store), attempt.changes)
    config, staged = in_force(config_of(run), attempt), run.inputs
    if config.actor_rollout_ref.actor.router_replay.replay_file is not None:
        raise RolloutError(
            "run.json names traces to replay (actor_rollout_ref.actor.router_replay.replay_file), "
            "so the run needs no rollout workers; do not start any"
        )
    function = config.custom_reward_function
    code = RewardCode(None)
    if staged.reward is not None and function is not None:
        content = read_data(store, staged.reward)
        code = RewardCode(content, function.name, function.reward_kwargs)
    val = staged.val_prompts
    return Inputs(
        config=config,
        geometry=run.geometry,
        prompts=StoredPrompts.of(store, staged.prompts),
        val_prompts=None if val is None else StoredPrompts.of(store, val),
        code=code,
        attempt=attempt.number,
    )


def _try_reward(inputs: Inputs) -> None:
    """Try the reward function before the engine starts. Raises RewardError if it always fails.

    A flow in a pod does not try it, because it may lack the function's packages and API keys.
    """
    config = inputs.config
    rows = inputs.prompts.read(tried_rows(inputs.prompts.rows), COLUMNS)
    questions = [Question.of(row) for row in rows.to_pylist()]
    timeout_s, start_s = config.reward.timeout_s, config.launch.start_timeout_s
    if note := try_reward(inputs.code, questions, timeout_s, start_s):
        log.warning("%s", note)


def start_scorer(inputs: Inputs) -> Scorer:
    """Start a scorer; the caller must close it. Raises RewardError if the code cannot be used."""
    config = inputs.config
    return Scorer(
        inputs.code, config.reward, config.launch.start_timeout_s, config.data.max_response_length
    )


def first_open_step(store: Store, total: int) -> int:
    """Return the first of `total` steps without a manifest, or `total` if all are sealed."""
    return next((s for s in range(total) if store.size(keys.manifest(s)) is None), total)


def version_at_start(store: Store, step: int, max_staleness: int) -> int:
    """Return the newest stored policy version that is not newer than the one that `step` uses.

    The engine starts with this version while the trainer starts. In a new run, the engine and the
    trainer both load version 0.

    Args:
        store: The store of the run.
        step: The first step that is not sealed.
        max_staleness: The setting trainer.max_staleness: the number of steps that may be planned
            ahead of training.
    """
    newest = max(0, step - max_staleness)
    for version in range(newest, 0, -1):
        if store.size(keys.policy(version)) is not None:
            return version
    return 0


def start_engine(policies: PolicyCache, inputs: Inputs, version: int) -> tuple[RolloutEngine, Held]:
    """Start an engine with a policy version; return the engine and the fetched version.

    Args:
        policies: The cache that fetches the policy version.
        inputs: The inputs of the run.
        version: The policy version to load.
    """
    progress.say(f"starting the engine with policy {version}")
    started = time.monotonic()
    config = inputs.config
    rollout = config.actor_rollout_ref.rollout
    with (
        policies.held(version) as held,
        lasting_errors(f"starting the engine with policy {version}", RolloutError),
    ):
        engine = RolloutEngine(
            held.folder,
            rollout,
            rollout.enable_rollout_routing_replay,
            config.data.max_prompt_length + config.data.max_response_length,
            inputs.geometry,
            version,
        )
    policies.loaded(version)
    seconds = time.monotonic() - started
    log.info("%s started with policy %d in %.1f s", engine.name, version, seconds)
    return engine, held
