"""plan.json: its stored form, and the errors for a broken plan."""

from dataclasses import asdict, replace

import pytest

from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, commit, content_digest, read_commit
from pipeline.run.plan import (
    PlannedPrompt,
    Sampling,
    StepPlan,
    ValidationPlan,
    Window,
    find_plan,
    find_step_plans,
    plan_json,
    publish_plan,
    read_plan,
)
from pipeline.store import ObjectMissingError, open_store

COMMON = {
    "policy_version": 3,
    "prompts": (PlannedPrompt(row=7, epoch=0), PlannedPrompt(row=2, epoch=1)),
    "n": 2,
    "sampling": Sampling(temperature=0.5, top_p=1.0, top_k=-1, max_tokens=7),
    "routes": True,
    "seed": 9,
    "shards": 2,
}
STEP = StepPlan(**COMMON, step=4)
VALIDATION = ValidationPlan(**{**COMMON, "prompts": (PlannedPrompt(7, 0), PlannedPrompt(2, 0))})
STORED = {
    "policy_version": 3,
    "prompts": [{"row": 7, "epoch": 0}, {"row": 2, "epoch": 1}],
    "n": 2,
    "sampling": {"temperature": 0.5, "top_p": 1.0, "top_k": -1, "max_tokens": 7},
    "routes": True,
    "seed": 9,
    "shards": 2,
}


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


@pytest.mark.parametrize(
    ("plan", "key", "step"),
    [(STEP, "steps/000004/plan.json", 4), (VALIDATION, "validations/000003/plan.json", 3)],
)
def test_the_stored_form_matches_existing_runs(store, plan, key, step):
    """In a validation plan, `step` is the policy version."""
    assert publish_plan(store, plan) == plan
    assert plan.key == key
    body = read_commit(store, key)
    assert {name: body[name] for name in body if name not in ("attempt", "content_sha256")} == {
        **STORED,
        "prompts": [asdict(prompt) for prompt in plan.prompts],
        "step": step,
    }
    assert body["content_sha256"] == content_digest(body)
    assert read_plan(store, key) == plan == find_plan(store, key)


def test_later_sub_plans_and_baselines_add_fields_to_the_stored_form(store):
    """The other fields are the same as in every plan."""
    plan = replace(STEP, sub_plan=2, baseline=True)
    assert publish_plan(store, plan) == plan
    body = read_commit(store, "steps/000004/plan.00002.json")
    assert (body["sub_plan"], body["baseline"]) == (2, True)
    assert body.keys() - {"sub_plan", "baseline"} == {*STORED, "step", "attempt", "content_sha256"}
    assert [plan.shard_key(shard) for shard in range(2)] == [keys.rollout(4, 4), keys.rollout(4, 5)]
    assert plan.prompts_of(1) == STEP.prompts_of(1)
    assert (plan.group_samples, STEP.group_samples) == (3, 2)


def test_the_plans_of_a_step_are_found_in_order(store):
    assert find_step_plans(store, 4) == []
    plans = [replace(STEP, sub_plan=number) for number in range(12)]
    for plan in reversed(plans):
        publish_plan(store, plan)
    publish_plan(store, replace(STEP, step=5))
    assert find_step_plans(store, 4) == plans
    store.delete(keys.sub_plan(4, 7))
    with pytest.raises(CorruptObjectError, match=r"plan\.00007\.json in .*no such object"):
        find_step_plans(store, 4)


def test_a_plan_is_published_once(store):
    """A later attempt with a different number of shards continues with the existing plan."""
    publish_plan(store, STEP)
    assert publish_plan(store, replace(STEP, shards=5)) == STEP


def test_the_prompts_are_divided_among_the_shards():
    assert STEP.prompts_of(0) == STEP.prompts[:1]
    assert STEP.prompts_of(1) == STEP.prompts[1:]
    assert STEP.shard_key(1) == keys.rollout(4, 1)
    assert VALIDATION.shard_key(1) == keys.validation(3, 1)


def test_find_plan_returns_none_for_a_missing_plan_but_read_plan_fails(store):
    assert find_plan(store, keys.plan(4)) is None
    with pytest.raises(ObjectMissingError):
        read_plan(store, keys.plan(4))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 0}, "n"),
        ({"prompts": [{"row": 1}]}, "epoch"),
        ({"sampling": {**STORED["sampling"], "top_p": 1.5}}, "top_p"),
        ({"prompts": [STORED["prompts"][0]] * 2}, "listed twice"),
        ({"n": 1 << 62}, f"{1 << 63} samples"),
        ({"shards": 60_000}, "120000 shards"),
        ({"step": 5}, "5"),
        ({"sub_plan": 2}, "2"),
    ],
)
def test_a_broken_plan_is_refused(store, change, says):
    plan = replace(STEP, sub_plan=1)
    commit(store, plan.key, {**plan_json(plan), **change}, "a")
    with pytest.raises(CorruptObjectError, match=f"{plan.key} in .*{says}"):
        read_plan(store, plan.key)


def test_a_validation_plan_of_another_version_is_refused(store):
    commit(store, keys.validation_plan(4), {**plan_json(VALIDATION), "step": 4}, "a")
    with pytest.raises(CorruptObjectError, match="'policy_version': 3"):
        read_plan(store, keys.validation_plan(4))


def test_a_window_finds_the_published_sub_plans():
    window = Window(tuple(replace(STEP, sub_plan=number) for number in range(3)), 3)
    assert [len(window.made(groups)) for groups in range(9)] == [1, 1, 1, 2, 2, 3, 3, 3, 3]
