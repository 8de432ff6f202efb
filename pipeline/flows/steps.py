"""The tasks of the flow: each publishes what workers wait for, then waits for what they commit.

    task        publishes                      waits for (made by)
    rollout     steps/N/plan.json              steps/N/rollout/*.json (rollout workers)
                steps/N/manifest.json
    train                                      steps/N/metrics.json (trainer)
    validate    validations/V/plan.json        validations/V/*.json (rollout workers)

Every task may be run again at any time: what exists is not made anew.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipeline.config.attempt import Attempt
from pipeline.config.tree import RunConfig
from pipeline.flows.plan import make_plan, make_validation_plan
from pipeline.flows.records import Run
from pipeline.launch.base import Screen, Workers
from pipeline.report.loggers import Logger
from pipeline.report.metrics import StepMetrics, read_metrics, read_validation
from pipeline.report.tables import reward_text
from pipeline.store import keys, open_store
from pipeline.store.commit import commit, find_commit, new_attempt
from pipeline.store.wait import wait_for_any
from pipeline.traces import read_manifest, seal, seal_replay, shard_ids, write_record_set


@dataclass(frozen=True)
class Context:
    """What every task of a run needs."""

    config: RunConfig
    run: Run
    attempt: Attempt
    workers: Workers
    screen: Screen
    loggers: tuple[Logger, ...]


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="rollout-{step}")
def rollout(context: Context, step: int) -> None:
    """Have a step's samples made, or taken from the replay file, and seal them."""
    store = context.run.store
    if store.size(keys.manifest(step)) is not None:
        return
    replay_file = context.config.actor_rollout_ref.actor.router_replay.replay_file
    if replay_file is not None:
        context.screen.phase("rollout", f"step {step}: sealing from {replay_file}")
        plan = make_plan(context.config, context.run, step)
        seal_replay(store, open_store(replay_file), step, plan)
    else:
        plan = _publish(context, keys.plan(step), make_plan(context.config, context.run, step))
        _await_shards(context, f"step {step}", plan, lambda shard: keys.rollout(step, shard))
        seal(store, step, plan["shards"], partial(shard_ids, plan), plan["policy_version"])
    context.screen.phase("rollout", None)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="train-{step}")
def train(context: Context, step: int) -> StepMetrics:
    """Wait until the trainer has finished a step; then write its record set, if one is wanted."""
    store = context.run.store
    samples = len(read_manifest(store, step).ids)
    context.screen.phase("training", f"step {step}: {samples} samples")
    _wait(context, keys.metrics(step), "the trainer")
    record(context.config, context.run, step)
    context.screen.phase("training", None)
    metrics = read_metrics(store, step)
    assert metrics is not None  # just awaited, and objects are never removed
    for logger in context.loggers:
        logger.log(step, metrics.values)
    return metrics


def record(config: RunConfig, run: Run, step: int) -> None:
    """Write a finished step to the record set, if the run has one."""
    record_file = config.actor_rollout_ref.actor.router_replay.record_file
    if record_file is not None:
        write_record_set(run.store, open_store(record_file), step)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="validate-{version}")
def validate(context: Context, version: int) -> None:
    """Have the rollout workers validate a policy version, and show the result."""
    body = make_validation_plan(context.config, context.run, version)
    plan = _publish(context, keys.validation_plan(version), body)
    _await_shards(
        context, f"validating policy {version}", plan, lambda s: keys.validation(version, s)
    )
    context.screen.phase("rollout", None)
    found = read_validation(context.run.store, version)
    assert found is not None  # just awaited
    context.screen.line(f"validation of policy {version}: reward {reward_text(found.reward)}")
    for logger in context.loggers:
        logger.log(version, {"val/reward/mean": found.reward})


def _publish(context: Context, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """Publish a plan, or find the one that an earlier start of the run published."""
    existing = find_commit(context.run.store, key)
    if existing is not None:
        return existing
    body = {**body, "shards": context.attempt.rollout_shards}
    return commit(context.run.store, key, body, new_attempt()).body


def _await_shards(
    context: Context, what: str, plan: dict[str, Any], key_of: Callable[[int], str]
) -> None:
    shards = plan["shards"]
    for shard in range(shards):
        context.screen.phase("rollout", f"{what}: {shard}/{shards} shards")
        _wait(context, key_of(shard), f"rollout worker {shard % context.attempt.rollout_workers}")


def _wait(context: Context, key: str, maker: str) -> None:
    # A step may include the start of an engine, after a restart too.
    timeout_s = context.attempt.start_timeout_s + context.attempt.step_timeout_s
    wait_for_any(context.run.store, [key], timeout_s, maker, context.workers.check)
