"""The tasks of the flow. A task publishes objects for the workers, then waits for their commits.

    task        publishes                      waits for (written by)
    rollout     steps/N/plan.json              steps/N/rollout/*.json (rollout workers)
                [steps/N/plan.KKKKK.json]      the same, until enough groups are accepted
                steps/N/manifest.json
    train                                      steps/N/metrics.json (trainer)
    validate    validations/V/plan.json        validations/V/*.json (rollout workers)

Every task may be repeated at any time, because tasks keep existing objects.
"""

from dataclasses import dataclass
from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from pipeline.config.tree import RunConfig
from pipeline.flows.sub_plans import make_groups
from pipeline.inputs.stage import StagedRun
from pipeline.launch.base import Screen, Workers
from pipeline.recorded import seal_replay, write_recorded_set
from pipeline.report.run_metrics import StepMetrics, read_metrics, read_validation
from pipeline.report.tables import reward_text
from pipeline.report.trackers.processes import TrackerProcess
from pipeline.run import keys
from pipeline.run.attempts import Attempt
from pipeline.run.plan import Plan, publish_plan
from pipeline.run.planning import make_validation_plan, make_window
from pipeline.run.uses import refuse_outdated
from pipeline.run.wait import wait_for_all, wait_for_any
from pipeline.store import open_store
from pipeline.traces import read_manifest, seal


@dataclass(frozen=True)
class Context:
    """The arguments that all tasks of a run share."""

    config: RunConfig
    """The settings that apply to the attempt."""
    run: StagedRun
    attempt: Attempt
    workers: Workers
    screen: Screen
    trackers: tuple[TrackerProcess, ...]


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="rollout-{step}")
def rollout(context: Context, step: int) -> None:
    """Let workers generate a step's samples, or take them from replay_file; then seal the step."""
    store = context.run.store
    if store.size(keys.manifest(step)) is not None:
        return
    replay = context.config.actor_rollout_ref.actor.router_replay
    if replay.replay_file is not None:
        context.screen.phase("rollout", f"step {step}: sealing from {replay.replay_file}")
        source = open_store(replay.replay_file)
        ours = make_window(context.config, context.run, step)
        seal_replay(store, source, step, ours, replay.replay_other_weights)
    else:
        shards = context.attempt.rollout_shards
        await_shards = partial(_await_shards, context)
        made = make_groups(context.config, context.run, step, shards, await_shards)
        seal(
            store,
            step,
            made.shards,
            made.ids_of_shard,
            made.policy_version,
            training=replay.records_routes,
            rejected=made.rejected,
            baselines=made.baselines,
        )
    context.screen.phase("rollout", None)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="train-{step}")
def train(context: Context, step: int) -> StepMetrics:
    """Wait until a step is trained, and return its metrics.

    If the run writes a recorded set, the step is also written to this set.
    """
    store = context.run.store
    samples = len(read_manifest(store, step).ids)
    context.screen.phase("training", f"step {step}: {samples} samples")
    _wait(context, keys.metrics(step), "the trainer")
    record(context.config, context.run, step)
    context.screen.phase("training", None)
    metrics = read_metrics(store, step)
    assert metrics is not None  # just awaited, and objects are never removed
    for tracker in context.trackers:
        tracker.log("step", step, metrics.values)
    return metrics


def record(config: RunConfig, run: StagedRun, step: int) -> None:
    """Write a finished step to the run's recorded set, if the run writes one.

    Args:
        config: The run's settings, which name the recorded set.
        run: The staged run.
        step: The finished step.
    """
    record_file = config.actor_rollout_ref.actor.router_replay.record_file
    if record_file is not None:
        write_recorded_set(run.store, open_store(record_file), step)


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="validate-{version}")
def validate(context: Context, version: int) -> None:
    """Let the rollout workers validate a policy version, and show the result."""
    shards = context.attempt.rollout_shards
    ours = make_validation_plan(context.config, context.run, version, shards)
    plan = publish_plan(context.run.store, ours)
    _await_shards(context, f"validating policy {version}", plan)
    context.screen.phase("rollout", None)
    found = read_validation(context.run.store, version)
    assert found is not None  # just awaited
    context.screen.line(f"validation of policy {version}: reward {reward_text(found.reward)}")
    for tracker in context.trackers:
        tracker.log("validation", version, found.metrics())


def _await_shards(context: Context, what: str, plan: Plan) -> None:
    workers = context.attempt.rollout_workers
    commits = [plan.shard_key(shard) for shard in range(plan.shards)]

    def wait(shard: int) -> None:
        context.screen.phase("rollout", f"{what}: {shard}/{plan.shards} shards")
        _wait(context, commits[shard], f"rollout worker {shard % workers}")

    wait_for_all(context.run.store, commits, wait)
    refuse_outdated(context.run.store, commits)


def _wait(context: Context, key: str, maker: str) -> None:
    # The wait may include the start of an engine, for example after a restart.
    launch = context.config.launch
    timeout_s = launch.start_timeout_s + launch.step_timeout_s
    wait_for_any(context.run.store, [key], timeout_s, maker, context.workers.check)
