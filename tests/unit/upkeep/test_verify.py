"""`verify` reads all objects that a run's commits name, and names each defect.

Damaged, lost and exchanged objects are tested in tests/unit/traces/test_accidents.py.
"""

from dataclasses import asdict

import pytest

from pipeline.recorded import write_recorded_set
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id, read_commit
from pipeline.run.plan import publish_plan
from pipeline.store import open_store
from pipeline.traces import seal, write_shard
from pipeline.upkeep.prune import prune
from pipeline.upkeep.verify import verify
from tests.attempts import make_attempt
from tests.data_files import put_data
from tests.memory_store import MemoryStore
from tests.samples import (
    make_plan,
    make_samples,
    make_validation_plan,
    sealed_r3,
    train,
    without_routes,
    write_run,
    write_shards,
)
from tests.stored_runs import SAMPLES, long_run, put_signed, whole_run


@pytest.fixture
def run(tmp_path):
    """A run with one step, one policy, one checkpoint and one validation of two shards."""
    store = open_store(str(tmp_path / "run"))
    whole_run(store, tmp_path)
    commit(store, keys.stop(0), {"reason": "finished", "message": ""}, "aaaaaaaa")
    assert not verify(store).problems
    return store


def named(store, step: int | None = None) -> set[str]:
    return {problem.key for problem in verify(store, step).problems}


@pytest.mark.parametrize(
    ("key", "change"),
    [
        (keys.run_json(), {"inputs": {}}),
        (keys.run_json(), {"geometry": {"experts": 16}}),
        (keys.attempt(0), {"number": 1}),
        (keys.attempt(0), {"total_training_steps": -5}),
        (keys.attempt(0), {"step_timeout_s": -1.0}),
        (keys.stop(0), {"reason": "foo"}),
        (keys.plan(0), {"prompts": 3}),
        (keys.plan(0), {"step": 1}),
        (keys.metrics(0), {"step": 1}),
        (keys.metrics(0), {"metrics": {"actor/pg_loss": "0.5"}}),
        (keys.metrics(0), {"policy_sha256": "0" * 64}),
        (keys.policy(1), {"version": 2}),
        (keys.policy(1), {"files": [{"key": "policies/000001/x"}]}),
        (keys.checkpoint(1), {"version": 2}),
        (keys.checkpoint(1), {"files": 1}),
        (keys.validation_plan(0), {"policy_version": 1}),
        (keys.validation(0, 1), {"shard": 0}),
        (keys.validation(0, 1), {"count": 1}),
        (keys.validation(0, 1), {"files": []}),
        (keys.rollout(0, 0), {"run": "a" * 64}),
        (keys.manifest(0), {"shards": 1}),
        (keys.manifest(0), {"run": "a" * 64}),
        (keys.manifest(0), {"policy_versions": [1]}),
    ],
)
def test_an_object_with_impossible_content_is_named(run, key, change):
    put_signed(run, key, {**read_commit(run, key), **change})
    assert key in named(run)


def test_a_validation_is_compared_with_its_plan(run):
    """Files and counts are correct, but the plan names other samples for a shard, or is lost."""
    run.delete(keys.validation_plan(0))
    assert {keys.validation(0, 0), keys.validation(0, 1)} <= named(run)
    publish_plan(run, make_validation_plan(prompts=4))
    (problem,) = verify(run).problems
    assert problem.key == keys.validation(0, 1)
    assert "val-000000/3/0" in problem.text


def test_inputs_that_an_attempt_staged_are_checked(run):
    mended = put_data(run, keys.input_file("2" * 64, "reward.py"), b"mended")
    make_attempt(run, 1, steps=1, changes={"inputs.reward": asdict(mended)})
    report = verify(run)
    assert not report.problems
    assert mended.key in report.seen
    run.delete(mended.key)
    assert named(run) == {mended.key}
    put_data(run, mended.key, b"meddled")
    assert named(run) == {mended.key}
    run.delete(keys.attempt(0))
    assert keys.attempt(0) in named(run)


def test_shards_of_inputs_that_the_run_no_longer_uses_are_found(run):
    make_attempt(run, 1, steps=1)
    body = read_commit(run, keys.attempt(1))
    put_signed(run, keys.attempt(1), {**body, "inputs_since": 1})
    shards = {keys.rollout(0, shard) for shard in range(2)}
    assert shards <= named(run)


def test_a_single_step_is_checked_separately(run):
    """Damage elsewhere is not reported."""
    for info in list(run.list(keys.policies())):
        if info.key.endswith(".safetensors"):
            run.delete(info.key)
    assert named(run)
    report = verify(run, 0)
    assert not report.problems
    assert (report.steps, report.samples, report.policies, report.validations) == (1, 6, 0, 0)
    run.delete(keys.plan(0))
    assert named(run, 0) == {keys.plan(0)}


def test_lost_metrics_are_reported_alone_and_with_all_steps(tmp_path):
    store = open_store(str(tmp_path / "long"))
    long_run(store, 5, ())
    for step in (1, 2):
        store.delete(keys.metrics(step))
    (problem,) = verify(store).problems
    assert problem.key == keys.metrics(1)
    assert keys.metrics(3) in problem.text
    assert [len(verify(store, step).problems) for step in range(5)] == [0, 1, 1, 0, 0]


def test_a_recorded_set_has_only_steps(run, tmp_path):
    record = open_store(str(tmp_path / "set"))
    write_recorded_set(run, record, 0)
    report = verify(record)
    assert not report.problems
    assert (report.steps, report.inputs) == (1, 0)
    record.delete(keys.manifest(0))
    assert named(record) == {keys.manifest(0)}


def test_a_plan_with_different_samples_is_found(tmp_path):
    store = open_store(str(tmp_path))
    sealed_r3(store, make_samples())
    publish_plan(store, make_plan())
    assert not verify(store).problems
    store.delete(keys.plan(0))
    publish_plan(store, make_plan(prompts=4))
    (problem,) = verify(store).problems
    assert problem.key == keys.manifest(0)
    assert "missing: 000000/3/0, 000000/3/1" in problem.text


def test_a_step_in_progress_is_not_damaged():
    """Its shards are committed, but it is not sealed. A shard's lost file is reported."""
    store = MemoryStore()
    write_run(store, SAMPLES, "R3")
    publish_plan(store, make_plan())
    write_shards(store, SAMPLES)
    assert not verify(store).problems
    (lost, *_) = (key for key in store.objects if key.endswith(".routes.parquet"))
    store.delete(lost)
    assert named(store) == {lost}


def appearing(before: MemoryStore, after: MemoryStore, least: int):
    """Yield stores that change from `before` to `after` between two requests for sizes; each moment
    is tried."""

    class Changing(MemoryStore):
        def __init__(self, requests: int) -> None:
            super().__init__(before.objects)
            self.requests = requests

        def list(self, prefix):
            return iter([*super().list(prefix)])

        def size(self, key):
            found = super().size(key)
            self.requests -= 1
            if self.requests == 0:
                self.objects = dict(after.objects)
            return found

    for requests in range(1, 100):
        store = Changing(requests)
        yield store
        if store.requests > 0:
            break
    assert requests > least


def test_a_step_that_is_trained_meanwhile_is_not_reported():
    before = MemoryStore()
    write_shard(before, 0, 0, new_write_id(), without_routes(SAMPLES), None, None)
    seal(before, 0, 1, lambda _: [sample.id for sample in SAMPLES], 0, training=True)
    after = MemoryStore(before.objects)
    train(after, SAMPLES)
    commit(after, keys.metrics(0), {"step": 0, "metrics": {}}, "a")
    for store in appearing(before, after, 5):
        assert not verify(store).problems


def test_a_step_that_is_pruned_meanwhile_is_not_reported():
    before = MemoryStore()
    sealed_r3(before, SAMPLES)
    after = MemoryStore(before.objects)
    list(prune(after, 0))
    for store in appearing(before, after, 5):
        report = verify(store)
        assert not report.problems
    assert verify(after).pruned == 1
