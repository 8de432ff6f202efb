"""In which order a worker makes the plans of a run with dynamic sampling: no engine."""

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
    """Publishes the next thing when the worker waits and nothing is there for it."""

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
    """Keys of the shards in the order in which they were made."""
    found = []

    class Maker:
        def __init__(self, store, **_):
            self.store = store

        def make(self, task, shard, weights):
            found.append(task.plan.shard_key(shard))
            commit(self.store, task.plan.shard_key(shard), {}, "a")

    monkeypatch.setattr(module, "ShardMaker", Maker)
    return found


def start(store, flow, monkeypatch, step=0):
    monkeypatch.setattr(module, "wait_for_any", flow.wait_for_any)
    inputs = SimpleNamespace(
        config=CONFIG.model_copy(
            update={"trainer": CONFIG.trainer.model_copy(update={"total_training_steps": 2})}
        ),
        prompts=None,
        val_prompts="validation",
        geometry=None,
        amendments=0,
    )
    attempt = make_attempt(store, 0, 2, validations=(0,))
    worker = Worker(store, 0, attempt, inputs, SimpleNamespace(version=0), "", None, step, [0])
    worker.run()


def test_until_its_step_is_sealed_a_worker_waits_for_the_next_sub_plan(made, monkeypatch):
    """Neither the next step, which may need another policy, nor a validation comes between; a
    sealed step is followed by the next, and the last sub-plan of a window by no other."""
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


def test_a_worker_that_comes_back_makes_what_is_missing_of_any_sub_plan(made, monkeypatch):
    store = MemoryStore()
    for sub_plan in range(2):
        step_plan(0, sub_plan)(store)
    commits(keys.rollout(0, 0))(store)
    start(store, Flow(store, [commits(keys.stop(0))]), monkeypatch)
    assert made == [keys.rollout(0, 1)]


def test_a_step_without_dynamic_sampling_ends_with_its_plan(made, monkeypatch):
    """As it always did: its seal is not waited for."""
    without = config_of(enable=False, max_staleness=1)
    monkeypatch.setattr("tests.unit.operators.rollout.test_order.CONFIG", without)
    store = MemoryStore()
    for step in range(2):
        step_plan(step)(store)
    flow = Flow(store, [validation(0), commits(keys.stop(0))])
    start(store, flow, monkeypatch)
    assert made == [keys.rollout(0, 0), keys.rollout(1, 0), keys.validation(0, 0)]
    sealed = {keys.manifest(step) for step in range(2)}
    assert not any(sealed & set(wanted) for wanted in flow.waited)
