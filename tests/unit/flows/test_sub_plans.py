"""Dynamic sampling in the flow: sub-plans, accepted groups, restarts, verification and replay.

Instead of workers, a function in this process commits real shards; tests/integration/run uses real
workers.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.flows.sub_plans import MadeGroups, make_groups
from pipeline.inputs.stage import StagedRun
from pipeline.recorded import seal_replay, write_recorded_set
from pipeline.rl.group_filter import FULL
from pipeline.run import keys
from pipeline.run.commit import (
    CorruptObjectError,
    new_write_id,
)
from pipeline.run.plan import Plan, PlannedPrompt, StepPlan, find_step_plans, publish_step_plan
from pipeline.run.planning import make_plan, make_window
from pipeline.store import Store
from pipeline.traces import (
    TraceError,
    expected_ids,
    read_manifest,
    seal,
    write_shard,
)
from pipeline.traces.format.types import Provenance, Sample
from pipeline.upkeep.problems import Report
from pipeline.upkeep.sweep import sweep
from pipeline.upkeep.verify import verify
from tests.memory_store import MemoryStore
from tests.samples import GEOMETRY, samples_of, train, without_routes, write_run
from tests.stored_runs import put_signed

SHARDS = 2
PROMPTS = 50


def config_of(**filters: object) -> RunConfig:
    """Return settings with 4 groups of 3 samples per step.

    By default, the groups come from up to 3 batches of 4 prompts.
    """
    size = filters.pop("gen_batch_size", None)
    staleness = filters.pop("max_staleness", 0)
    estimator = filters.pop("adv_estimator", "grpo")
    return RunConfig.model_validate(
        {
            "data": {"train_batch_size": 4, "gen_batch_size": size},
            "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"n": 3}},
            "algorithm": {
                "adv_estimator": estimator,
                "filter_groups": {
                    "enable": True,
                    "metric": "seq_reward",
                    "max_num_gen_batches": 3,
                    **filters,
                },
            },
            "trainer": {"experiment_name": "t", "max_staleness": staleness},
        }
    )


def every(number: int) -> Callable[[str], float | None]:
    """Return a reward function whose rewards vary only in groups whose prompt's row is a multiple
    of `number`."""

    def reward(id: str) -> float | None:
        _, prompt, k = id.split("/")
        row = int(prompt.split(".")[0])
        return float(k == "0") if row % number == 0 else float(row % 2)

    return reward


@dataclass
class Workers:
    """Workers that commit the awaited shards.

    The flow is killed after `killed_at` events. An event is a shard's commit or the end of a wait.
    """

    store: Store
    rewards: Callable[[str], float | None]
    killed_at: int = -1
    said: list[str] = field(default_factory=list)
    made: list[str] = field(default_factory=list)

    def __call__(self, what: str, plan: Plan) -> None:
        assert isinstance(plan, StepPlan)
        self.said.append(what)
        for shard in range(plan.shards):
            if self.store.size(plan.shard_key(shard)) is None:
                self._may_be_killed()
                samples = samples_of(plan, shard, self.rewards)
                source = Provenance("R3", plan.policy_version, "vllm 0.32.0")
                number = plan.number_of(shard)
                write_shard(
                    self.store, plan.step, number, new_write_id(), samples, GEOMETRY, source
                )
                self.made.append(plan.shard_key(shard))
        self._may_be_killed()

    def _may_be_killed(self) -> None:
        self.killed_at -= 1
        if self.killed_at == -1:
            raise KeyboardInterrupt


def run_of(store: Store, config: RunConfig) -> StagedRun:
    return StagedRun("t", store.uri, store, config, {}, None, PROMPTS, 0, ())  # type: ignore[arg-type]


def made_by(
    store: Store, config: RunConfig, workers: Workers, step: int = 0, shards: int = SHARDS
) -> MadeGroups:
    made = make_groups(config, run_of(store, config), step, shards, workers)
    seal(
        store,
        step,
        made.shards,
        made.ids_of_shard,
        made.policy_version,
        rejected=made.rejected,
        baselines=made.baselines,
    )
    return made


def described(store: Store, config: RunConfig, kind: str = "R3", **more: str) -> None:
    """Write run.json and the prompts of all windows that the tests use."""
    rows = tuple(PlannedPrompt(row, 0) for row in range(PROMPTS))
    plan = replace(make_plan(config, run_of(store, config), 0, 1), prompts=rows)
    everything = samples_of(plan, 0, every(1))
    settings = config.model_dump(mode="json")
    groups = {name: settings[name] for name in ("algorithm", "data")}
    write_run(store, everything, kind, settings=groups, **more)


def test_groups_without_variance_are_replaced_until_the_step_is_full():
    """Sub-plans take the window's prompts in order. The shards of all sub-plans of a step are
    numbered consecutively.

    Rejected groups stay in the store with their reasons.
    """
    store, config = MemoryStore(), config_of()
    described(store, config)
    workers = Workers(store, every(3))
    made = made_by(store, config, workers)
    manifest = read_manifest(store, 0)
    groups = list(dict.fromkeys(manifest.rows["group"].to_pylist()))
    assert len(groups) == 4
    assert len(made.plans) > 1
    assert [plan.key for plan in made.plans][:2] == [
        "steps/000000/plan.json",
        "steps/000000/plan.00001.json",
    ]
    assert workers.made == [keys.rollout(0, n) for n in range(SHARDS * len(made.plans))]
    planned = [id for plan in made.plans for id in expected_ids(plan)]
    assert len(set(planned)) == len(planned) == 12 * len(made.plans)
    window = make_window(config, run_of(store, config), 0)
    assert [plan.prompts for plan in made.plans] == [
        plan.prompts for plan in window.plans[: len(made.plans)]
    ]
    varied = [g for g in dict.fromkeys(id.rpartition("/")[0] for id in planned) if _row(g) % 3 == 0]
    assert sorted(groups) == sorted(varied[:4])
    for group in manifest.rejected:
        reason = f"seq_reward is {_row(group.group) % 2} in all samples"
        assert (group.reason, group.samples) == (FULL if group.group in varied else reason, 3)
    assert len(groups) + len(manifest.rejected) == 4 * len(made.plans)
    assert workers.said[0] == "step 0"
    assert workers.said[1].endswith(" of 4 groups accepted")
    assert not verify(store).problems


def _row(group: str) -> int:
    return int(group.split("/")[1].split(".")[0])


def test_a_flow_that_is_killed_at_any_point_still_seals_the_same_step():
    """The next attempt has a different number of shards, but still publishes the same plans, seals
    the same groups, and generates no shard twice."""
    config = config_of()
    whole = MemoryStore()
    expected = made_by(whole, config, Workers(whole, every(3)))
    for killed_at in range(3 * len(expected.plans)):
        store = MemoryStore()
        with pytest.raises(KeyboardInterrupt):
            made_by(store, config, Workers(store, every(3), killed_at))
        before = len([info for info in store.list("steps/") if keys.commits_shard(info.key)])
        again = Workers(store, every(3))
        made = made_by(store, config, again, shards=SHARDS + 1)
        assert made == expected
        assert len(again.made) == len(expected.plans) * SHARDS - before
        found, theirs = read_manifest(store, 0), read_manifest(whole, 0)
        columns = ["id", "token_digest", "rows_valid", "reward", "not_trained"]
        assert found.rows.select(columns).equals(theirs.rows.select(columns))
        assert found.rejected == theirs.rejected


def test_batches_that_a_step_certainly_needs_are_published_together():
    """One batch of 2 prompts cannot give 4 groups, so the flow publishes two batches together."""
    config = config_of(gen_batch_size=2, max_num_gen_batches=9)
    store = MemoryStore()
    published = []

    def await_shards(what: str, plan: Plan) -> None:
        published.append(len(find_step_plans(store, 0)))
        Workers(store, every(3))(what, plan)

    made = make_groups(config, run_of(store, config), 0, 1, await_shards)
    assert published[0] == 2
    assert published == sorted(published)
    assert published[-1] == len(made.plans)
    accepted = 2 * len(made.plans) - len(made.rejected)
    assert accepted == 4


def test_a_window_that_does_not_fill_the_step_ends_the_run():
    store, config = MemoryStore(), config_of()
    with pytest.raises(InputError) as caught:
        made_by(store, config, Workers(store, lambda _: 1.0))
    [text] = caught.value.problems
    assert text.startswith(
        "algorithm.filter_groups.max_num_gen_batches: found 0 groups with variance in step 0 after "
        "3 batches of 4 prompts, expected data.train_batch_size=4; rejected groups: 12 where "
        "seq_reward is 1 in all samples. Start a new run"
    )
    assert len(find_step_plans(store, 0)) == 3
    assert store.size(keys.manifest(0)) is None


def test_a_sub_plan_that_differs_from_the_settings_is_refused():
    """The flow and the workers would number its shards differently."""
    store, config = MemoryStore(), config_of()
    run = run_of(store, config)
    first = make_plan(config, run, 0, SHARDS)
    publish_step_plan(store, first)
    publish_step_plan(store, make_plan(config, run, 0, SHARDS + 1, 1))
    with pytest.raises(CorruptObjectError, match=r"plan\.00001\.json in .*: found a different"):
        made_by(store, config, Workers(store, every(3)))


def test_a_metric_that_the_reward_function_does_not_return_is_named():
    store, config = MemoryStore(), config_of(metric="rubric")
    with pytest.raises(InputError, match=r"sample 000000/\d+/0: the reward function returned only"):
        made_by(store, config, Workers(store, every(3)))


def test_windows_and_policy_lag_are_the_same_as_without_dynamic_sampling():
    """No prompt is in two steps of an epoch, and a step's sub-plans share one policy version."""
    config = config_of(max_staleness=1)
    run = run_of(MemoryStore(), config)
    windows = [make_window(config, run, step).plans for step in range(4)]
    prompts = [prompt for plans in windows for plan in plans for prompt in plan.prompts]
    assert len(set(prompts)) == len(prompts) == 4 * 3 * 4
    assert [{plan.policy_version for plan in plans} for plans in windows] == [{0}, {0}, {1}, {2}]
    with pytest.raises(ValueError, match="sub-plan 3, expected a number below 3"):
        make_plan(config, run, 0, 1, 3)


def test_replaying_a_recorded_set_accepts_the_same_groups():
    """The set contains the sub-plans and the rejected groups, and so does a run that replays it.

    A run with different settings is refused.
    """
    store, config = MemoryStore(), config_of()
    described(store, config)
    made = made_by(store, config, Workers(store, every(3)))
    record, again = MemoryStore(), MemoryStore()
    write_recorded_set(store, record, 0)
    assert find_step_plans(record, 0) == list(made.plans)
    assert not verify(record).problems
    described(again, config, replay_file="memory://set")
    window = make_window(config, run_of(again, config), 0)
    replayed = seal_replay(again, record, 0, window)
    assert replayed.ids == read_manifest(store, 0).ids
    assert replayed.rejected == read_manifest(store, 0).rejected
    assert not verify(again).problems
    for other, says in (
        (config_of(enable=False), "rejected groups: 000000/"),
        (config_of(gen_batch_size=3), "not expected|missing"),
    ):
        refused = MemoryStore()
        described(refused, other, replay_file="memory://set")
        with pytest.raises(TraceError, match=says):
            seal_replay(refused, record, 0, make_window(other, run_of(refused, other), 0))


def test_an_r2_set_has_shards_with_only_rejected_groups():
    """The trainer records no routes for rejected groups, but the set contains their samples."""
    store, config = MemoryStore(), config_of(gen_batch_size=2, max_num_gen_batches=9)
    described(store, config, kind="R2")
    samples: dict[str, Sample] = {}

    def await_shards(what: str, plan: Plan) -> None:
        assert isinstance(plan, StepPlan)
        made = samples_of(plan, 0, every(3))
        samples.update((sample.id, sample) for sample in made)
        write_shard(store, 0, plan.number_of(0), new_write_id(), without_routes(made), None, None)

    made = make_groups(config, run_of(store, config), 0, 1, await_shards)
    seal(store, 0, made.shards, made.ids_of_shard, 0, training=True, rejected=made.rejected)
    assert [] in [made.ids_of_shard(shard) for shard in range(made.shards)]
    train(store, [samples[id] for id in read_manifest(store, 0).ids])
    record, again = MemoryStore(), MemoryStore()
    write_recorded_set(store, record, 0)
    described(again, config, kind="R2", replay_file="memory://set")
    seal_replay(again, record, 0, make_window(config, run_of(again, config), 0))
    for place in (store, record, again):
        assert not verify(place).problems
        assert len(read_manifest(place, 0).rejected) == len(made.rejected)


@pytest.mark.parametrize("replayed", [False, True])
def test_a_sweep_keeps_sub_plans(replayed):
    store, config = MemoryStore(), config_of()
    described(store, config)
    made_by(store, config, Workers(store, every(3)))
    if replayed:
        source, store = store, MemoryStore()
        write_recorded_set(source, store, 0)
    assert keys.sub_plan(0, 1) in store.objects
    debris = keys.rollout_file(0, 9, new_write_id(), "routes")
    store.create(debris, b"debris")
    report = Report(store.uri)
    assert [found.key for found in sweep(store, -1.0, report)] == [debris]
    assert not report.problems


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        (lambda body: body["rejected"].pop(), keys.manifest(0), "missing"),
        (lambda body: body.update(sub_plan=2), keys.sub_plan(0, 1), "sub_plan"),
        (None, keys.sub_plan(0, 1), "not expected"),
        (None, keys.plan(0), keys.sub_plan(0, 1)),
    ],
)
def test_verify_compares_a_step_with_its_sub_plans(change, key, says):
    store, config = MemoryStore(), config_of()
    described(store, config)
    made_by(store, config, Workers(store, every(3)))
    assert len(find_step_plans(store, 0)) == 2
    body = json.loads(store.objects[key])
    if change is None:
        store.delete(key)
    else:
        change(body)
        put_signed(store, key, body)
    problems = verify(store).problems
    assert any(says in problem.text for problem in problems), problems


def test_baselines_do_not_influence_which_groups_are_accepted():
    """With ReMax, each group has an extra greedy sample, whose reward does not count towards the
    variance."""

    def reward(id: str) -> float | None:
        return 5.0 if id.endswith("/3") else every(3)(id)

    store, config = MemoryStore(), config_of(adv_estimator="remax")
    described(store, config)
    made = made_by(store, config, Workers(store, reward))
    without = MemoryStore()
    plain = made_by(without, config_of(), Workers(without, every(3)))
    assert made.rejected == plain.rejected
    rows = read_manifest(store, 0).rows.select(["id", "not_trained", "reward"]).to_pylist()
    assert len(rows) == 4 * 4
    for row in rows:
        greedy = row["id"].endswith("/3")
        assert row["not_trained"] == ("greedy baseline" if greedy else None)
    assert {group.samples for group in read_manifest(store, 0).rejected} == {4}
    assert not verify(store).problems
