"""The samples that a worker generates for a plan, and the first policy version that it loads.

These tests need no engine.
"""

import json
from dataclasses import replace
from functools import cache

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from operators.rollout.prompts import shards_of, wanted_of
from operators.rollout.types import RolloutError
from operators.rollout.worker import first_open_step, version_at_start
from pipeline.run import keys
from pipeline.run.plan import PlannedPrompt, Sampling, StepPlan
from pipeline.run.prompt_table import SCHEMA
from pipeline.store import open_store
from pipeline.traces import expected_ids, sampling_seed
from tests.samples import stored_prompts


@cache
def prompts(rows=12):
    columns = {
        "prompt_id": range(rows),
        "messages": ["[]"] * rows,
        "token_ids": [[2, 10 + row] for row in range(rows)],
        "data_source": ["sums"] * rows,
        "ground_truth": [json.dumps({"answer": row}) for row in range(rows)],
        "extra_info": [None if row % 2 else json.dumps([row]) for row in range(rows)],
    }
    return stored_prompts(pa.table(columns, SCHEMA), "inputs/x/prompts.parquet")


def common(count=7, shards=3, n=2):
    return {
        "prompts": tuple(PlannedPrompt(row, row % 2) for row in range(count)),
        "n": n,
        "sampling": Sampling(1.0, 0.9, -1, 5),
        "shards": shards,
        "routes": True,
        "seed": 3,
    }


def plan(**parts):
    return StepPlan(**common(**parts), step=4, policy_version=4)


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4))
def test_workers_and_shards_cover_a_plan_once(count, shards, workers, n):
    """Exactly one worker generates each sample of a plan, and each group stays in one shard."""
    body = plan(count=count, shards=shards, n=n)
    made = [
        wanted.id
        for worker in range(workers)
        for shard in shards_of(worker, workers, shards)
        for wanted in wanted_of(body, shard, prompts())
    ]
    assert len(made) == len(set(made))
    assert sorted(made) == sorted(expected_ids(body))
    for shard in range(shards):
        groups = [wanted.group for wanted in wanted_of(body, shard, prompts())]
        assert all(groups.count(group) == n for group in groups)


def test_a_planned_sample_contains_the_inputs_of_the_engine_and_the_reward_function():
    [first, second, *_] = wanted_of(plan(), 1, prompts())
    assert (first.id, first.group, first.prompt_id) == ("000004/1.1/0", "000004/1.1", "1.1")
    assert second.id == "000004/1.1/1"
    assert first.request.prompt_tokens == (2, 11)
    assert first.request.seed == sampling_seed(3, "000004/1.1/0") != second.seed
    assert first.prompt.ground_truth == {"answer": 1}
    assert first.prompt.extra_info == {}


def test_a_baseline_is_the_last_sample_of_its_group_and_greedy():
    made = wanted_of(replace(plan(), baseline=True), 1, prompts())
    assert [one.id for one in made[:3]] == [f"000004/1.1/{k}" for k in range(3)]
    assert [one.request.greedy for one in made[:3]] == [False, False, True]
    assert [one.request for one in wanted_of(plan(), 1, prompts())] == [
        one.request for one in made if not one.baseline
    ]


def test_a_plan_for_different_prompts_is_refused():
    with pytest.raises(RolloutError, match=r"prompts\.parquet: .*names row 5, expected 0\.\.4:"):
        wanted_of(plan(), 2, prompts(rows=5))


def test_a_worker_starts_with_the_newest_policy_that_the_next_step_may_use(tmp_path):
    """The worker does not wait for a policy version that has not been published yet."""
    store = open_store(str(tmp_path))
    assert first_open_step(store, 5) == 0
    assert version_at_start(store, 0, 0) == 0
    for step in range(3):
        store.create(keys.manifest(step), b"{}")
    for version in range(3):
        store.create(keys.policy(version), b"{}")
    assert first_open_step(store, 5) == 3
    assert first_open_step(store, 3) == 3
    assert version_at_start(store, 3, 0) == 2
    store.create(keys.policy(3), b"{}")
    assert version_at_start(store, 3, 0) == 3
    assert version_at_start(store, 3, 1) == 2
