"""One shard: generate, score, commit.

engine's thread    step, step, step ──► finished responses ─┐  put: waits when memory is full
reward's threads                                            ├► decode, score
writer's thread                                             └► check, wait for the reward, encode,
                                                               upload
engine's thread    last token ──► waits for the thread ──► files finished ──► commit
"""

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from operators.rollout.engine import RolloutEngine
from operators.rollout.handover import Handover
from operators.rollout.prompts import Prompts, Wanted, wanted_of
from operators.rollout.sample_maker import Engine, SampleMaker
from operators.rollout.scoring import Scorer
from pipeline import progress
from pipeline.run import keys
from pipeline.run.amendments import refuse_amended
from pipeline.run.commit import Committed, commit, file_list, new_write_id
from pipeline.run.plan import Plan, Sampling, StepPlan
from pipeline.run.uses import AMENDMENTS
from pipeline.store import Store
from pipeline.traces import (
    Compression,
    Geometry,
    Provenance,
    Sample,
    ShardWriter,
    write_samples,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A plan and its prompts."""

    plan: Plan
    prompts: Prompts

    @property
    def name(self) -> str:
        """The task's name for logs. Example: 'step 3'."""
        if isinstance(self.plan, StepPlan):
            return f"step {self.plan.step}"
        return f"validation of policy {self.plan.policy_version}"


@dataclass(frozen=True)
class Spent:
    """The time of the engine's thread, in seconds."""

    started: float
    """time.monotonic() at the start."""
    generation_s: float
    """From the first request to the last token."""
    blocked_s: float
    """Part of it: the engine stopped, because the writer's memory was full."""


Made = tuple[SampleMaker, Spent, Committed]


@dataclass(frozen=True)
class ShardMaker:
    """Makes and commits the shards of one rollout worker."""

    store: Store
    engine: RolloutEngine
    scorer: Scorer
    geometry: Geometry | None
    """The model's geometry; None: a dense model."""
    worker: int
    """Index of the worker, for the commits."""
    buffer_bytes: int
    """Maximum memory of samples that are generated but not yet written."""
    amendments: int
    """How many amendments of the run the worker knows; with more, nothing is committed."""
    compression: Compression = "zstd"
    """Of the routes files."""

    def make(self, task: Task, shard: int, weights: str) -> None:
        """Make and commit a shard; the engine must have the task's policy loaded.

        `weights` is the digest of that policy's weights.

        Samples are encoded and uploaded while others are generated. Raises RolloutError,
        TraceError and RewardError, each naming the sample, and StoreError, also when the run was
        amended; an error aborts the engine's other requests, and nothing is committed.
        """
        plan = task.plan
        wanted = wanted_of(plan, shard, task.prompts)
        progress.say(
            f"{task.name} shard {plan.number_of(shard)}: generating", len(wanted), "samples"
        )
        if isinstance(plan, StepPlan):
            maker, spent, committed = self._make_step(plan, shard, wanted, weights)
        else:
            maker, spent, committed = self._make_validation(plan, shard, wanted)
        _log(task, plan.number_of(shard), maker, spent, committed)

    def _make_validation(self, plan: Plan, shard: int, wanted: Sequence[Wanted]) -> Made:
        samples: list[Sample] = []
        maker = SampleMaker(self.engine, self.scorer, wanted, samples.append, routes=False)
        spent = stream(self.engine, wanted, plan.sampling, maker, self.buffer_bytes)
        body = _validation_body(plan, shard, samples, spent.generation_s)
        body["maker"] = {"worker": self.worker, "sources": maker.sources}
        write_id = new_write_id()
        key = keys.validation_file(plan.policy_version, shard, write_id)
        body["files"] = file_list([write_samples(self.store, key, samples)])
        refuse_amended(self.store, self.amendments)
        known = {AMENDMENTS: self.amendments}
        return maker, spent, commit(self.store, plan.shard_key(shard), body | known, write_id)

    def _make_step(
        self, plan: StepPlan, shard: int, wanted: Sequence[Wanted], weights: str
    ) -> Made:
        geometry = self.geometry if plan.routes else None
        provenance = None
        if geometry is not None:
            provenance = Provenance("R3", self.engine.version, self.engine.name)
        # Half of the memory is for responses that wait for the thread, half for the writer.
        half = self.buffer_bytes // 2
        policies = {self.engine.version: weights}
        with ShardWriter(
            self.store,
            plan.step,
            plan.number_of(shard),
            new_write_id(),
            geometry,
            provenance,
            plan.group_samples,
            half,
            policies,
            self.compression,
        ) as writer:
            routes = geometry is not None
            maker = SampleMaker(self.engine, self.scorer, wanted, writer.add, routes)
            spent = stream(self.engine, wanted, plan.sampling, maker, half)
            maker.finish(writer.finish)
            seconds = facts(maker, spent, writer.upload_s)
            refuse_amended(self.store, self.amendments)
            known = {"worker": self.worker, AMENDMENTS: self.amendments}
            made = {"tokens": maker.tokens, "extras": maker.extras, "sources": maker.sources}
            committed = writer.commit({**known, **seconds, **made})
        return maker, spent, committed


def stream(
    engine: Engine,
    wanted: Sequence[Wanted],
    sampling: Sampling,
    maker: SampleMaker,
    buffer_bytes: int,
) -> Spent:
    """Generate, make samples of finished responses in a second thread, and wait for both."""
    started = time.monotonic()
    requests = [one.request for one in wanted]
    with (
        closing(engine.generate(requests, sampling)) as responses,
        Handover(maker, buffer_bytes, "writer") as handover,
    ):
        for finished in responses:
            handover.put(maker.score(finished), finished.nbytes)
        generation_s = time.monotonic() - started
        progress.say("scoring and writing the last samples")
        handover.finish()
    return Spent(started, generation_s, handover.blocked_s)


def facts(maker: SampleMaker, spent: Spent, upload_s: float) -> dict[str, float]:
    """Seconds for the commit: the writer's thread by part, and the waiting that it caused.

    `capture_s` and `encode_s` are CPU seconds. `upload_s` is the time that the thread spent on the
    store, waiting included, `blocked_s` how long the engine stopped because the writer's memory was
    full, `after_generation_s` the worker's time after its last token.
    """
    return {
        "generation_s": spent.generation_s,
        "score_s": maker.score_s,
        "capture_s": maker.capture_s,
        "encode_s": maker.add_s,
        "upload_s": upload_s,
        "blocked_s": spent.blocked_s,
        "after_generation_s": time.monotonic() - spent.started - spent.generation_s,
    }


def _validation_body(
    plan: Plan, shard: int, samples: list[Sample], generated_s: float
) -> dict[str, Any]:
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    return {
        "version": plan.policy_version,
        "shard": shard,
        "count": len(rewards),
        "masked": len(samples) - len(rewards),
        "reward_sum": sum(rewards),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "time_s": generated_s,
    }


def _log(task: Task, shard: int, maker: SampleMaker, spent: Spent, committed: Committed) -> None:
    log.info(
        "%s shard %d: %d samples, %d tokens in %.1f s (%.0f tokens/s), %.1f s in all%s%s%s",
        task.name,
        shard,
        maker.samples,
        maker.tokens,
        spent.generation_s,
        maker.tokens / spent.generation_s,
        time.monotonic() - spent.started,
        f"; {maker.lacking} samples lack routes" if maker.lacking else "",
        f"; {maker.masked} rewards failed and are masked" if maker.masked else "",
        "" if committed.ours else "; another worker had committed it already",
    )
    if spent.blocked_s > max(1.0, 0.01 * spent.generation_s):
        log.warning(
            "%s shard %d: the engine stood still for %.1f s, because the writer's memory was full: "
            "raise actor_rollout_ref.rollout.trace_buffer_mib, or look at the store and the reward "
            "function (waited for it %.1f s: raise reward.num_workers)",
            task.name,
            shard,
            spent.blocked_s,
            maker.score_s,
        )
