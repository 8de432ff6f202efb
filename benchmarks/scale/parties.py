"""The parties of a simulated run: the flow, rollout workers and training ranks.

    flow      runs pipeline.flows.steps, the real code: it plans, waits and seals
    workers   make the same requests as operators.rollout.worker; pipeline.traces writes the shards
    ranks     make the same requests as operators.training.worker; `load_step` reads the samples of
              each rank

Sleeps stand in for engines and models, and clock events stand in for the ranks' collectives.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from benchmarks.scale.clock import Clock
from operators.training.batches import ahead
from operators.training.batches.step_data import layout_rules, load_step
from pipeline.config.tree import RunConfig
from pipeline.flows.steps import Context, rollout, train
from pipeline.inputs.stage import StagedRun
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import publish_policy
from pipeline.run import keys
from pipeline.run.attempts import Attempt, attempt_of
from pipeline.run.commit import commit, new_write_id
from pipeline.run.plan import StepPlan, read_plan
from pipeline.run.shares import await_shares, write_share
from pipeline.run.uses import refuse_superseded
from pipeline.run.wait import wait_for_any
from pipeline.store import Store
from pipeline.traces import (
    Geometry,
    Provenance,
    Sample,
    new_sample,
    open_manifest,
    shard_ids,
    write_shard,
)

GEOMETRY = Geometry(experts=16, topk=4, layers=(0, 1))
PROMPT, RESPONSE = 4, 4
TENSOR_PARALLEL = 2
"""Number of ranks that read the same samples."""
_PATIENCE_S = 1e6


@dataclass(frozen=True)
class Size:
    """Size of the simulated run. Example: Size(500, 500, 1000, 2, 3, 1, 60.0, 40.0)."""

    workers: int
    ranks: int
    groups: int
    """Number of prompts per step."""
    n: int
    """Number of samples per prompt."""
    steps: int
    staleness: int
    rollout_s: float
    """Median time to generate a shard, in seconds; the slowest of 500 takes 1.5 times as long."""
    train_s: float

    @property
    def config(self) -> RunConfig:
        """Settings of the run."""
        return RunConfig.model_validate(
            {
                "data": {"train_batch_size": self.groups},
                "actor_rollout_ref": {
                    "model": {"path": "none"},
                    "actor": {
                        "ppo_mini_batch_size": self.groups,
                        "ppo_micro_batch_size_per_gpu": 1,
                        "router_replay": {"mode": "R3"},
                        "megatron": {"tensor_model_parallel_size": TENSOR_PARALLEL},
                    },
                    "rollout": {"n": self.n, "enable_rollout_routing_replay": True},
                },
                "trainer": {
                    "experiment_name": "simulated",
                    "max_staleness": self.staleness,
                    "total_training_steps": self.steps,
                },
                "launch": {"rollout_workers": self.workers},
            }
        )


@dataclass
class Lags:
    """Times of events in simulated seconds, keyed by step or policy version."""

    shards: dict[int, list[float]] = field(default_factory=dict)
    """Times at which the shards were committed."""
    planned: dict[int, float] = field(default_factory=dict)
    """Time when the flow began to publish the plan."""
    sealed: dict[int, float] = field(default_factory=dict)
    """Time when the flow finished sealing the step."""
    found: dict[int, float] = field(default_factory=dict)
    """Time when rank 0 found the step sealed."""
    read: dict[int, list[float]] = field(default_factory=dict)
    """Seconds that each rank took to read its samples."""
    touched: list[int] = field(default_factory=list)
    """Number of shards from which each rank read samples."""
    policy: dict[int, float] = field(default_factory=dict)
    """Time when the version was committed."""
    exported: dict[int, float] = field(default_factory=dict)
    """Time when all ranks had written their shares of a version."""
    began: dict[int, list[float]] = field(default_factory=dict)
    """Seconds that each worker took to begin once it was free and had its plan and policy."""
    noticed: dict[int, float] = field(default_factory=dict)
    """Time when the flow finished reading the step's metrics."""

    def seal_s(self, step: int) -> float:
        """Return the seconds from the last shard to the manifest."""
        return self.sealed[step] - max(self.shards[step])


@dataclass
class Run:
    """A simulated run and the state that its parties share."""

    size: Size
    store: Store
    clock: Clock
    lags: Lags = field(default_factory=Lags)

    def __post_init__(self) -> None:
        self.config = self.size.config
        self.attempt: Attempt = attempt_of(self.config, 0)
        self._done: Counter[int] = Counter()
        self.context = context_of(self.config, self.store, self.attempt)

    def begin(self) -> None:
        """Write the first policy, and add all parties to the clock."""
        self._publish(0)
        size, add = self.size, self.clock.add
        add("flow", self._flow_of_training)
        for step in range(size.steps):
            add("flow", lambda step=step: self._flow_of_rollout(step))
        for index in range(size.workers):
            add("worker", lambda index=index: self._worker(index))
        for index in range(size.ranks):
            add("rank", lambda index=index: self._rank(index))

    def _flow_of_rollout(self, step: int) -> None:
        """Run a step's rollout task at the time at which pipeline.flows.drive would start it."""
        before = step - self.size.staleness - 1
        if before >= 0:
            self.clock.wait(f"flow: step {before} trained")
        self.lags.planned[step] = self.clock.now
        rollout.fn(self.context, step)
        self.lags.sealed[step] = self.clock.now
        self.clock.happen(f"flow: step {step} sealed")

    def _flow_of_training(self) -> None:
        for step in range(self.size.steps):
            self.clock.wait(f"flow: step {step} sealed")
            train.fn(self.context, step)
            self.lags.noticed[step] = self.clock.now
            self.clock.happen(f"flow: step {step} trained")

    def _worker(self, index: int) -> None:
        rng = np.random.default_rng(index)
        stop, version = keys.stop(self.attempt.number), -1
        for step in range(self.size.steps):
            free = self.clock.now
            self.store.size(keys.manifest(step))
            self._wait([stop, keys.plan(step)], "the flow")
            plan = read_plan(self.store, keys.plan(step))
            assert isinstance(plan, StepPlan)
            shards = range(index, plan.shards, self.size.workers)
            missing = [s for s in shards if self.store.size(plan.shard_key(s)) is None]
            if version != plan.policy_version:
                version = plan.policy_version
                self._load(version, stop)
            due = max(free, self.lags.planned[step], self.lags.policy[version])
            self.lags.began.setdefault(step, []).append(self.clock.now - due)
            for shard in missing:
                self.store.size(stop)
                self.clock.sleep(self.size.rollout_s * rng.lognormal(0.0, 0.13))
                self._write(plan, shard)

    def _load(self, version: int, stop: str) -> None:
        self._wait([stop, keys.policy(version)], "the trainer")
        with tempfile.TemporaryDirectory() as folder:
            fetch_policy(self.store, version, Path(folder))

    def _write(self, plan: StepPlan, shard: int) -> None:
        """Write and commit a shard, as operators.rollout.shard does."""
        provenance = Provenance("R3", plan.policy_version, "simulated")
        samples = list(samples_of(plan, shard))
        refuse_superseded(self.store, 0)
        write_shard(self.store, plan.step, shard, new_write_id(), samples, GEOMETRY, provenance)
        self.lags.shards.setdefault(plan.step, []).append(self.clock.now)

    def _rank(self, index: int) -> None:
        """Act as a rank of operators.training.worker; rank 0 polls the store for all ranks."""
        loaded, stop = -1, keys.stop(self.attempt.number)
        for step in range(self.size.steps):
            if index == 0:
                self._wait([stop, keys.manifest(step)], "the flow")
                self.lags.found[step] = self.clock.now
                self.clock.happen(f"rank 0: step {step}")
            self.clock.wait(f"rank 0: step {step}")
            if loaded < step:
                self._read(index, step)
                loaded = step
            done = self.clock.now + self.size.train_s
            last = step + 1 == self.size.steps
            while self.size.staleness and not last and self.clock.now < done:
                if self.store.size(keys.manifest(step + 1)) is not None:
                    self._read(index, step + 1)
                    loaded = step + 1
                    break
                self.clock.sleep(ahead._PAUSE_S)
            self.clock.sleep(max(0.0, done - self.clock.now))
            self._finish(index, step)

    def _finish(self, index: int, step: int) -> None:
        """Write this rank's share of the policy, and wait for all shares; rank 0 then commits."""
        write_id = f"{step:08x}"
        name = f"model-{index:05d}.safetensors"
        key = keys.policy_file(step + 1, write_id, name)
        self.store.create(key, bytes(64))
        share = {"rank": index, "files": [key]}
        share_key = keys.policy_share(step + 1, write_id, index)
        write_share(self.store, share_key, share, write_id)
        self._done[step] += 1
        if self._done[step] == self.size.ranks:
            self.clock.happen(f"ranks: step {step}")
        self.clock.wait(f"ranks: step {step}")
        if index == 0:
            self.lags.exported[step + 1] = self.clock.now
            self.clock.add("rank", lambda: self._commit(step, write_id))

    def _commit(self, step: int, write_id: str) -> None:
        """Act as rank 0's background job: wait for all shares, commit policy and metrics."""
        ranks = range(self.size.ranks)
        shares = [keys.policy_share(step + 1, write_id, rank) for rank in ranks]
        await_shares(self.store, shares, _PATIENCE_S)
        self._publish(step + 1)
        metrics = {"step": step, "metrics": {"actor/loss": 0.0}}
        commit(self.store, keys.metrics(step), metrics, new_write_id())

    def _publish(self, version: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            weights = np.random.default_rng(version).integers(0, 1 << 16, 4096).astype(np.uint16)
            save_file({"weight": weights}, Path(folder) / "model.safetensors")
            publish_policy(self.store, version, Path(folder))
        self.lags.policy[version] = self.clock.now

    def _read(self, index: int, step: int) -> None:
        """Read all of this rank's samples of a sealed step."""
        began = self.clock.now
        rules = layout_rules(self.config, self.size.ranks // TENSOR_PARALLEL)
        sealed = open_manifest(self.store, step)
        rank = index // TENSOR_PARALLEL
        data = load_step(self.store, sealed, self.config, rules, rank, GEOMETRY)
        for id in data.samples:
            data.samples[id]
            assert data.routes is not None
            data.routes[id]
        data.close()
        rows = data.manifest.rows["samples"].to_pylist()
        self.lags.touched.append(len({row["file"] for row in rows}))
        self.clock.sleep(0.0)
        self.lags.read.setdefault(step, []).append(self.clock.now - began)

    def _wait(self, wanted: list[str], maker: str) -> None:
        found = wait_for_any(self.store, wanted, _PATIENCE_S, maker)
        assert found == wanted[-1], found


class Nobody:
    """Stand-in for the flow's screen and launcher that shows and watches nothing."""

    def phase(self, who: str, what: str | None) -> None: ...

    def check(self) -> bool:
        return False


def context_of(config: RunConfig, store: Store, attempt: Attempt) -> Context:
    """Return the context that the flow's tasks receive.

    Args:
        config: Settings of the run.
        store: The run's store.
        attempt: The run's only attempt.
    """
    prompts = config.data.train_batch_size * config.trainer.total_training_steps
    run = StagedRun("simulated", store.uri, store, config, None, GEOMETRY, prompts, 0, ())
    return Context(config, run, attempt, Nobody(), Nobody(), ())


def samples_of(plan: StepPlan, shard: int) -> Iterator[Sample]:
    """Yield a shard's samples, each as small as possible."""
    for id in shard_ids(plan, shard):
        _, prompt, k = id.split("/")
        rng = np.random.default_rng(int(prompt.partition(".")[0]))
        tokens_P = rng.integers(0, 100, PROMPT)
        rng = np.random.default_rng([int(k), *map(ord, prompt)])
        yield new_sample(
            plan.step,
            prompt,
            int(k),
            tokens_P,
            rng.integers(0, 100, RESPONSE),
            _experts(rng, PROMPT + RESPONSE - 1),
            logprobs=-rng.random(RESPONSE),
            reward=float(k == "0"),
            versions=plan.policy_version,
        )


def _experts(rng: np.random.Generator, rows: int) -> npt.NDArray[np.int64]:
    scores = rng.random((rows, len(GEOMETRY.layers), GEOMETRY.experts))
    return np.argsort(scores, axis=-1)[..., : GEOMETRY.topk]
