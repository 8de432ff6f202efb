"""Generates, scores and commits one shard.

engine's thread    step, step, step ──► finished responses ─┐  put: waits when memory is full
reward's threads                                            ├► decode, score
writer's thread                                             └► check, wait for the reward, encode,
                                                               upload
engine's thread    last token ──► waits for the writer ──► files finished ──► commit
"""

import logging
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from operators.rollout.engine import RolloutEngine
from operators.rollout.handover import Handover
from operators.rollout.prompts import Wanted, wanted_of
from operators.rollout.sample_maker import Engine, SampleMaker
from operators.rollout.scoring import Scorer
from pipeline import progress
from pipeline.policies.cache import PolicyTimes
from pipeline.run import keys
from pipeline.run.commit import Committed, commit, file_list, new_write_id
from pipeline.run.description import run_digest
from pipeline.run.plan import Plan, Sampling, StepPlan
from pipeline.run.prompt_table import StoredPrompts
from pipeline.run.uses import ATTEMPT, refuse_superseded
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
    """A plan with the prompt table that it refers to."""

    plan: Plan
    prompts: StoredPrompts

    @property
    def name(self) -> str:
        """The task's name in logs. Example: 'step 3'."""
        if isinstance(self.plan, StepPlan):
            return f"step {self.plan.step}"
        return f"validation of policy {self.plan.policy_version}"


@dataclass(frozen=True)
class Spent:
    """Times measured in the engine's thread, in seconds."""

    started: float
    """time.monotonic() at the start."""
    generation_s: float
    """The time from the first request to the last token."""
    blocked_s: float
    """The part of `generation_s` during which the engine waited because the writer's memory was
    full."""


Made = tuple[SampleMaker, Spent, Committed]
_NO_POLICY = PolicyTimes()


@dataclass(frozen=True)
class ShardMaker:
    """The part of a rollout worker that generates and commits its shards."""

    store: Store
    engine: RolloutEngine
    scorer: Scorer
    geometry: Geometry | None
    """The model's geometry; None for a dense model."""
    worker: int
    """The worker's index, to be recorded in commits."""
    buffer_bytes: int
    """The maximum total size, in bytes, of samples that have been generated but not yet written."""
    attempt: int
    """The number of the worker's attempt. If the run has a later one, the worker commits nothing.
    """
    compression: Compression = "zstd"
    """The compression of the routes files."""

    def make(self, task: Task, shard: int, weights: str, policy: PolicyTimes = _NO_POLICY) -> None:
        """Generate and commit a shard; the engine must have the task's policy version loaded.

        Samples are encoded and uploaded while others are generated. An error aborts the engine's
        other requests, and nothing is committed.

        Args:
            task: The plan and its prompts.
            shard: The index of the shard in the plan.
            weights: The weights digest of the loaded policy version.
            policy: Time spent loading policy versions since the last shard.

        Raises:
            RolloutError, TraceError, RewardError: A sample failed; the message names it.
            StoreError: The store failed, or a later attempt has begun.
        """
        plan = task.plan
        wanted = wanted_of(plan, shard, task.prompts)
        progress.say(
            f"{task.name} shard {plan.number_of(shard)}: generating", len(wanted), "samples"
        )
        if isinstance(plan, StepPlan):
            maker, spent, committed = self._make_step(plan, shard, wanted, weights, policy)
        else:
            maker, spent, committed = self._make_validation(plan, shard, wanted)
        _log(task, plan.number_of(shard), maker, spent, committed)

    def _make_validation(self, plan: Plan, shard: int, wanted: Sequence[Wanted]) -> Made:
        samples: list[Sample] = []
        maker = SampleMaker(self.engine, self.scorer, wanted, samples.append, routes=False)
        spent = stream(self.engine, wanted, plan.sampling, maker, self.buffer_bytes)
        body = _validation_body(plan, shard, samples, spent.generation_s)
        made = {"worker": self.worker, ATTEMPT: self.attempt, "sources": maker.sources}
        body["maker"] = made
        write_id = new_write_id()
        key = keys.validation_file(plan.policy_version, shard, write_id)
        body["files"] = file_list([write_samples(self.store, key, samples)])
        refuse_superseded(self.store, self.attempt)
        return maker, spent, commit(self.store, plan.shard_key(shard), body, write_id)

    def _make_step(
        self,
        plan: StepPlan,
        shard: int,
        wanted: Sequence[Wanted],
        weights: str,
        policy: PolicyTimes,
    ) -> Made:
        geometry = self.geometry if plan.routes else None
        provenance = None
        if geometry is not None:
            provenance = Provenance("R3", self.engine.version, self.engine.name)
        # Half of the memory is for responses that wait for the writer's thread; the other half is
        # for that thread's work.
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
            run_digest(self.store),
        ) as writer:
            routes = geometry is not None
            maker = SampleMaker(self.engine, self.scorer, wanted, writer.add, routes)
            spent = stream(self.engine, wanted, plan.sampling, maker, half)
            maker.finish(writer.finish)
            seconds = facts(maker, spent, writer.upload_s)
            seconds |= {"policy_fetch_s": policy.fetch, "policy_stall_s": policy.stall}
            refuse_superseded(self.store, self.attempt)
            known = {"worker": self.worker, ATTEMPT: self.attempt}
            made = {"tokens": maker.tokens, "extras": maker.extras, "sources": maker.sources}
            made["left_out"] = maker.left_out
            committed = writer.commit({**known, **seconds, **made})
        return maker, spent, committed


def stream(
    engine: Engine,
    wanted: Sequence[Wanted],
    sampling: Sampling,
    maker: SampleMaker,
    buffer_bytes: int,
) -> Spent:
    """Generate responses, build their samples in a second thread, and wait for the last sample.

    Args:
        engine: Generates the responses.
        wanted: The planned samples.
        sampling: The plan's sampling settings.
        maker: Submits responses for scoring, and builds the samples.
        buffer_bytes: Limits the total size, in bytes, of the responses that wait for the second
            thread.

    Returns:
        The times measured in the engine's thread.
    """
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
    """Return the times that a shard's commit records, in seconds.

    `score_s` is the time that the writer's thread waited for rewards. `capture_s` and `encode_s`
    are that thread's CPU seconds for reading routes and for encoding. `upload_s` is the time that
    the writer spent on the store, including waiting. `blocked_s` is how long the engine waited
    because the writer's memory was full. `after_generation_s` is the time since the last token.

    Args:
        maker: Holds the times measured in the writer's thread.
        spent: The times measured in the engine's thread.
        upload_s: Seconds that the writer spent on the store.
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
        "%s shard %d: %d samples, %d tokens in %.1f s (%.0f tokens/s), %.1f s in total%s%s%s",
        task.name,
        shard,
        maker.samples,
        maker.tokens,
        spent.generation_s,
        maker.tokens / spent.generation_s,
        time.monotonic() - spent.started,
        f"; {maker.lacking} samples lack some routes" if maker.lacking else "",
        f"; {maker.masked} samples are masked, because scoring them failed" if maker.masked else "",
        "" if committed.ours else "; another worker had already committed this shard",
    )
    if spent.blocked_s > max(1.0, 0.01 * spent.generation_s):
        log.warning(
            "%s shard %d: the engine waited for %.1f s because the writer's memory was full: raise "
            "actor_rollout_ref.rollout.trace_buffer_mib, or check the speed of the store and of "
            "the reward function (waiting for rewards took %.1f s: raise reward.num_workers)",
            task.name,
            shard,
            spent.blocked_s,
            maker.score_s,
        )
