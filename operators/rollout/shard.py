"""One shard: generate, score, commit."""

import logging
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from operators.rollout.engine import RolloutEngine
from operators.rollout.handover import Handover
from operators.rollout.making import Making
from operators.rollout.prompts import Prompts, wanted_of
from operators.rollout.records import Sampling
from operators.rollout.scoring import Scorer
from pipeline.store import Store, keys
from pipeline.store.commit import Committed, commit, file_list, new_attempt
from pipeline.traces import Geometry, Provenance, Sample, write_samples, write_shard

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

    `geometry` is the model's, None for a dense one. Of responses that are not written yet,
    `buffer_bytes` at most are held. Raises RolloutError, TraceError and RewardError, each naming
    the sample, and StoreError; the engine's other requests are aborted and nothing is committed.
    """
    started = time.monotonic()
    wanted = wanted_of(task.plan, shard, task.prompts, task.validation)
    if not task.plan["routes"]:
        geometry = None
    samples: list[Sample] = []
    making = Making(engine, scorer, wanted, geometry is not None, samples.append)
    requests = [one.request for one in wanted]
    with (
        closing(engine.generate(requests, Sampling.of_plan(task.plan))) as responses,
        Handover(making, buffer_bytes, "writer") as handover,
    ):
        for finished in responses:
            handover.put(finished, finished.nbytes)
        generated_s = time.monotonic() - started
        handover.finish()
    attempt = new_attempt()
    if task.validation:
        committed = _commit_validation(store, task, shard, attempt, samples, generated_s)
    else:
        provenance = None
        if geometry is not None:
            provenance = Provenance("R3", engine.version, engine.name)
        step = task.plan["step"]
        maker = {"worker": worker, "generation_s": generated_s}
        committed = write_shard(store, step, shard, attempt, samples, geometry, provenance, maker)
    _log(task, shard, samples, generated_s, time.monotonic() - started, committed)


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


def _log(
    task: Task,
    shard: int,
    samples: list[Sample],
    generated_s: float,
    total_s: float,
    committed: Committed,
) -> None:
    tokens = sum(len(sample.response_tokens_G) for sample in samples)
    unknown = [s.id for s in samples if s.routes is not None and not s.routes.valid_T.all()]
    masked = sum(sample.reward is None for sample in samples)
    log.info(
        "%s shard %d: %d samples, %d tokens in %.1f s (%.0f tokens/s), %.1f s in all%s%s%s",
        task.name,
        shard,
        len(samples),
        tokens,
        generated_s,
        tokens / generated_s,
        total_s,
        f"; {len(unknown)} samples lack routes" if unknown else "",
        f"; {masked} rewards failed and are masked" if masked else "",
        "" if committed.ours else "; another worker had committed it already",
    )
