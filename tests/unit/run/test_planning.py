"""A plan depends only on settings and step, and each epoch uses each prompt exactly once."""

from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.keys import with_value
from pipeline.config.tree import RunConfig
from pipeline.run.plan import PlannedPrompt, Sampling, StepPlan, ValidationPlan
from pipeline.run.planning import make_plan, make_validation_plan
from pipeline.traces import baseline_ids, expected_ids


@dataclass(frozen=True)
class Counts:
    prompt_count: int = 5
    val_prompt_count: int = 3


CONFIG = RunConfig.model_validate(
    {
        "data": {"train_batch_size": 4, "max_response_length": 7, "seed": 3},
        "actor_rollout_ref": {
            "model": {"path": "m"},
            "rollout": {
                "n": 2,
                "temperature": 0.5,
                "enable_rollout_routing_replay": True,
                "val_kwargs": {"n": 3, "top_k": 5},
            },
        },
        "trainer": {"experiment_name": "t", "seed": 9, "max_staleness": 1},
    }
)


def prompts_of_step(step, n_prompts, batch, shuffle, seed):
    """Return the row and the epoch of each prompt of a step."""
    data = {"train_batch_size": batch, "shuffle": shuffle, "seed": seed}
    config = CONFIG.model_copy(update={"data": CONFIG.data.model_copy(update=data)})
    return [(one.row, one.epoch) for one in make_plan(config, Counts(n_prompts), step, 1).prompts]


@given(
    n_prompts=st.integers(1, 40),
    batch=st.integers(1, 12),
    steps=st.integers(1, 12),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**40),
)
def test_epochs_follow_each_other_without_a_gap(n_prompts, batch, steps, shuffle, seed):
    """Successive steps go through epoch 0, epoch 1 and so on; an epoch contains every prompt
    once."""
    chosen = [
        pair
        for step in range(steps)
        for pair in prompts_of_step(step, n_prompts, batch, shuffle, seed)
    ]
    assert [epoch for _, epoch in chosen] == [i // n_prompts for i in range(len(chosen))]
    for epoch in range(len(chosen) // n_prompts):
        rows = [row for row, e in chosen if e == epoch]
        assert sorted(rows) == list(range(n_prompts))
        assert shuffle or rows == list(range(n_prompts))
    assert len(set(chosen)) == len(chosen)


def test_the_shuffled_order_never_changes():
    """A restart with a different version of Python or numpy must plan the same steps."""
    assert prompts_of_step(0, 6, 6, True, 1) == [(4, 0), (5, 0), (2, 0), (1, 0), (3, 0), (0, 0)]


def test_orders_differ_between_epochs_and_seeds():
    orders = {
        tuple(row for row, _ in prompts_of_step(step, 50, 50, True, seed))
        for step in range(3)
        for seed in range(3)
    }
    assert len(orders) == 9


def test_the_plan_of_a_step_follows_the_settings():
    plan = make_plan(CONFIG, Counts(), 2, shards=2)
    assert plan == StepPlan(
        step=2,
        policy_version=1,
        prompts=tuple(PlannedPrompt(*pair) for pair in prompts_of_step(2, 5, 4, True, 3)),
        n=2,
        sampling=Sampling(temperature=0.5, top_p=1.0, top_k=-1, max_tokens=7),
        routes=True,
        seed=9,
        shards=2,
    )
    assert len(set(expected_ids(plan))) == 8


def test_remax_plans_a_greedy_sample_for_each_prompt():
    config = with_value(CONFIG, "algorithm.adv_estimator", "remax")
    plan = make_plan(config, Counts(), 2, shards=2)
    assert plan == replace(make_plan(CONFIG, Counts(), 2, shards=2), baseline=True)
    assert len(set(expected_ids(plan))) == 12
    assert {id.rpartition("/")[2] for id in baseline_ids(plan)} == {"2"}


def test_rollouts_lag_by_at_most_max_staleness():
    versions = [make_plan(CONFIG, Counts(), step, 1).policy_version for step in range(4)]
    assert versions == [0, 0, 1, 2]


def test_the_plan_of_a_validation_follows_the_settings():
    assert make_validation_plan(CONFIG, Counts(), 4, shards=2) == ValidationPlan(
        policy_version=4,
        prompts=tuple(PlannedPrompt(row, 0) for row in range(3)),
        n=3,
        sampling=Sampling(temperature=0.0, top_p=1.0, top_k=5, max_tokens=7),
        routes=False,
        seed=9,
        shards=2,
    )
