"""One shard: generate, score, commit.

engine's thread    step, step, step ──► finished responses ─┐  put: waits when memory is full
writer's thread                                             └► check, score, encode, upload
engine's thread    last token ──► waits for the thread ──► files finished ──► commit
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from operators.rollout.engine import RolloutEngine
from operators.rollout.handover import Handover
from operators.rollout.making import Engine, Making
from operators.rollout.prompts import Prompts, Wanted, wanted_of
from operators.rollout.records import Sampling
from operators.rollout.scoring import Scorer
from pipeline.store import Store, keys
from pipeline.store.commit import Committed, commit, file_list, new_attempt
from pipeline.traces import Geometry, Provenance, Sample, ShardWriter, write_samples

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A plan object and the prompts that it names rows of."""

    plan: Mapping[str, Any]
    validation: bool
    """True: it validates a policy and trains nothing."""
    prompts: Prompts

    @property
    def version(self) -> int:
        """The policy version that makes the samples."""
        return int(self.plan["policy_version"])

    @property
    def name(self) -> str:
        """For logs and errors. Example: 'step 3'."""
        if self.validation:
            return f"validation of policy {self.version}"
        return f"step {self.plan['step']}"

    def key(self, shard: int) -> str:
        """The commit object of a shard."""
        if self.validation:
            return keys.validation(self.version, shard)
        return keys.rollout(self.plan["step"], shard)


def make_shard(
    store: Store,
    engine: RolloutEngine,
    scorer: Scorer,
    geometry: Geometry | None,
    task: Task,
    shard: int,
    worker: int,
    buffer_bytes: int,
) -> None:
    """Make a shard and commit it; the engine has the task's policy loaded.

    `geometry` is the model's, None for a dense one. Samples are encoded and uploaded while others
    are generated; of those that are not written yet, `buffer_bytes` at most are held. Raises
    RolloutError, TraceError and RewardError, each naming the sample, and StoreError; the engine's
    other requests are aborted then and nothing is committed.
    """
    wanted = wanted_of(task.plan, shard, task.prompts, task.validation)
    if not task.plan["routes"]:
        geometry = None
    sampling = Sampling.of_plan(task.plan)
    attempt = new_attempt()
    if task.validation:
        samples: list[Sample] = []
        making = Making(engine, scorer, wanted, samples.append, routes=False)
        spent = stream(engine, wanted, sampling, making, buffer_bytes)
        committed = _commit_validation(store, task, shard, attempt, samples, spent.generation_s)
        _log(task, shard, making, spent, committed)
        return
    provenance = None
    if geometry is not None:
        provenance = Provenance("R3", engine.version, engine.name)
    # Half of the memory is for what waits for the thread, half for what the writer collects.
    half = buffer_bytes // 2
    step, group_size = task.plan["step"], task.plan["n"]
    with ShardWriter(store, step, shard, attempt, geometry, provenance, group_size, half) as writer:
        making = Making(engine, scorer, wanted, writer.add, routes=geometry is not None)
        spent = stream(engine, wanted, sampling, making, half)
        making.finish(writer.finish)
        committed = writer.commit({"worker": worker, **facts(making, spent, writer.upload_s)})
    _log(task, shard, making, spent, committed)


@dataclass(frozen=True)
class Spent:
    """Where the time of the engine's thread went, in seconds."""

    started: float
    """time.monotonic() at the start."""
    generation_s: float
    """From the first request to the last token."""
    blocked_s: float
    """Part of it: the engine stood still, because the writer's memory was full."""


def stream(
    engine: Engine,
    wanted: Sequence[Wanted],
    sampling: Sampling,
    making: Making,
    buffer_bytes: int,
) -> Spent:
    """Generate, and make samples of what has finished in a thread beside it; waits for both."""
    started = time.monotonic()
    requests = [one.request for one in wanted]
    with (
        closing(engine.generate(requests, sampling)) as responses,
        Handover(making, buffer_bytes, "writer") as handover,
    ):
        for finished in responses:
            handover.put(finished, finished.nbytes)
        generation_s = time.monotonic() - started
        handover.finish()
    return Spent(started, generation_s, handover.blocked_s)


def facts(making: Making, spent: Spent, upload_s: float) -> dict[str, float]:
    """Seconds for the commit: what the writer's thread spent by part, and who waited for it.

    `capture_s` and `encode_s` are seconds of the processor. `upload_s` is how long the store took
    or made the thread wait, `blocked_s` how long the engine stood still because the writer's memory
    was full, `after_generation_s` what the worker still took after its last token.
    """
    return {
        "generation_s": spent.generation_s,
        "score_s": making.score_s,
        "capture_s": making.capture_s,
        "encode_s": making.add_s,
        "upload_s": upload_s,
        "blocked_s": spent.blocked_s,
        "after_generation_s": time.monotonic() - spent.started - spent.generation_s,
    }


def _commit_validation(
    store: Store, task: Task, shard: int, attempt: str, samples: list[Sample], generated_s: float
) -> Committed:
    file = write_samples(store, keys.validation_file(task.version, shard, attempt), samples)
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    body = {
        "version": task.version,
        "shard": shard,
        "count": len(rewards),
        "masked": len(samples) - len(rewards),
        "reward_sum": sum(rewards),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "time_s": generated_s,
        "files": file_list([file]),
    }
    return commit(store, task.key(shard), body, attempt)


def _log(task: Task, shard: int, making: Making, spent: Spent, committed: Committed) -> None:
    log.info(
        "%s shard %d: %d samples, %d tokens in %.1f s (%.0f tokens/s), %.1f s in all%s%s%s",
        task.name,
        shard,
        making.samples,
        making.tokens,
        spent.generation_s,
        making.tokens / spent.generation_s,
        time.monotonic() - spent.started,
        f"; {making.lacking} samples lack routes" if making.lacking else "",
        f"; {making.masked} rewards failed and are masked" if making.masked else "",
        "" if committed.ours else "; another worker had committed it already",
    )
    if spent.blocked_s > max(1.0, 0.01 * spent.generation_s):
        log.warning(
            "%s shard %d: the engine stood still for %.1f s, because the writer's memory was full: "
            "raise actor_rollout_ref.rollout.trace_buffer_mib, or look at the store and the reward "
            "function (%.1f s)",
            task.name,
            shard,
            spent.blocked_s,
            making.score_s,
        )
