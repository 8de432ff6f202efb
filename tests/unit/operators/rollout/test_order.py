"""The order in which a worker handles plans, with dynamic sampling; these tests need no engine."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from operators.rollout import worker as module
from operators.rollout.worker import Worker
from pipeline.run import keys
from pipeline.run.commit import commit
from pipeline.run.plan import publish_plan
from pipeline.run.planning import make_plan, make_validation_plan
from tests.attempts import make_attempt
from tests.memory_store import MemoryStore
from tests.unit.flows.test_sub_plans import config_of

COUNTS = SimpleNamespace(prompt_count=50, val_prompt_count=2)
CONFIG = config_of(max_staleness=1)


class Flow:
    """A fake flow that runs the next actions of `script` while the worker waits for a key."""

    def __init__(self, store, script):
        self.store, self.script, self.waited = store, script, []

    def wait_for_any(self, store, wanted, timeout_s, maker):
        self.waited.append(wanted)
        while True:
            for key in wanted:
                if store.size(key) is not None:
                    return key
            self.script.pop(0)(store)


def step_plan(step, sub_plan=0):
    return lambda store: publish_plan(store, make_plan(CONFIG, COUNTS, step, 1, sub_plan))


def validation(version):
    return lambda store: publish_plan(store, make_validation_plan(CONFIG, COUNTS, version, 1))


def commits(key):
    return lambda store: commit(store, key, {}, "a")


@pytest.fixture
def made(monkeypatch):
    """The keys of the shards in the order in which the worker generated them."""
    found = []

    class Maker:
        def __init__(self, store, **_):
            self.store = store

        def make(self, task, shard, weights, policy):
            found.append(task.plan.shard_key(shard))
            commit(self.store, task.plan.shard_key(shard), {}, "a")

    monkeypatch.setattr(module, "ShardMaker", Maker)
    return found


def start(store, flow, monkeypatch, step=0, validations=(0,), *, index=0, workers=1):
    """Run a worker; return each policy version that it reported as the oldest one still needed."""
    needed = []
    monkeypatch.setattr(module, "wait_for_any", flow.wait_for_any)
    inputs = SimpleNamespace(
        config=CONFIG.model_copy(
            update={"trainer": CONFIG.trainer.model_copy(update={"total_training_steps": 2})}
        ),
        prompts=None,
        val_prompts="validation",
        geometry=None,
        attempt=0,
    )
    attempt = make_attempt(store, 0, 2, validations=validations)
    attempt = replace(attempt, rollout_workers=workers)
    worker = Worker(
        store=store,
        index=index,
        attempt=attempt,
        inputs=inputs,
        engine=SimpleNamespace(version=0),
        weights="",
        policies=SimpleNamespace(needs=needed.append),
        ahead=None,
        scorer=None,
        step=step,
        validations=list(validations),
    )
    worker.run()
    return needed


def test_a_worker_waits_for_the_next_sub_plan_until_its_step_is_sealed(made, monkeypatch):
    """While it waits, the worker starts neither a validation nor another step, because either may
    need a different policy version. Once the step is sealed, the worker waits for the next step.
    After the last sub-plan of a window, it does not wait for another sub-plan."""
    store = MemoryStore()
    flow = Flow(
        store,
        [
            lambda s: [publish(s) for publish in (step_plan(0), step_plan(1), validation(0))],
            step_plan(0, 1),
            commits(keys.manifest(0)),
            step_plan(1, 1),
            step_plan(1, 2),
            commits(keys.stop(0)),
        ],
    )
    start(store, flow, monkeypatch)
    assert made == [
        keys.rollout(0, 0),
        keys.rollout(0, 1),
        keys.rollout(1, 0),
        keys.rollout(1, 1),
        keys.rollout(1, 2),
        keys.validation(0, 0),
    ]
    stop = keys.stop(0)
    assert [stop, keys.sub_plan(0, 2), keys.manifest(0)] in flow.waited
    assert flow.waited[-1] == [stop]


def test_a_worker_looks_for_validations_only_up_to_its_step_and_runs_all_of_them(made, monkeypatch):
    """The flow plans the validation of a version once the step that creates this version
    is trained. Here step 1 is planned before step 0 is trained, because max_staleness is 1."""
    without = config_of(enable=False, max_staleness=1)
    monkeypatch.setattr("tests.unit.operators.rollout.test_order.CONFIG", without)
    monkeypatch.setattr(Worker, "_load", lambda *_: True)
    store = MemoryStore()
    flow = Flow(
        store,
        [
            lambda s: [publish(s) for publish in (validation(0), step_plan(0))],
            step_plan(1),
            validation(1),
            validation(2),
            commits(keys.stop(0)),
        ],
    )
    start(store, flow, monkeypatch, validations=(0, 1, 2))
    shards = [keys.rollout(0, 0), keys.validation(0, 0), keys.rollout(1, 0)]
    assert made == [*shards, keys.validation(1, 0), keys.validation(2, 0)]
    stop, plans = keys.stop(0), [keys.validation_plan(version) for version in range(3)]
    assert flow.waited == [
        [stop, keys.plan(0), plans[0]],
        [stop, keys.plan(1), plans[0], plans[1]],
        [stop, keys.plan(1), plans[1]],
        [stop, plans[1], plans[2]],
        [stop, plans[2]],
        [stop],
    ]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_worker_of_an_attempt_that_only_validates_runs_all_validations(made, monkeypatch, step):
    """All steps are sealed; `step` of them were sealed before the worker started."""
    monkeypatch.setattr(Worker, "_load", lambda *_: True)
    store = MemoryStore()
    for sealed in range(2):
        commits(keys.manifest(sealed))(store)
    flow = Flow(store, [validation(0), validation(2), validation(1), commits(keys.stop(0))])
    start(store, flow, monkeypatch, step, validations=(0, 1, 2))
    assert made == [keys.validation(0, 0), keys.validation(2, 0), keys.validation(1, 0)]


def test_a_worker_without_shards_loads_no_policy_and_releases_old_ones(made, monkeypatch):
    """The plans come from an earlier attempt with only one worker, so each has one shard."""
    without = config_of(enable=False)
    monkeypatch.setattr("tests.unit.operators.rollout.test_order.CONFIG", without)
    monkeypatch.setattr(Worker, "_load", lambda *_: pytest.fail("the worker has loaded a policy"))
    store = MemoryStore()
    flow = Flow(store, [step_plan(0), step_plan(1), validation(0), commits(keys.stop(0))])
    needed = start(store, flow, monkeypatch, index=1, workers=2)
    assert made == []
    assert list(dict.fromkeys(needed)) == [0, 1, 2]
