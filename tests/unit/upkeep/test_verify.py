"""`verify` reads all objects that a run's commits name, and names each defect.

Damaged, lost or swapped objects are tested in tests/unit/traces/test_damage.py.
"""

import json
from dataclasses import asdict

import pytest
from pipeline.run.amendments import Amendment, write_amendment
from pipeline.upkeep.verify.training import rows_by_file

from pipeline.run import keys
from pipeline.run.commit import (
    CONTENT_SHA256,
    CorruptObjectError,
    commit,
    new_write_id,
    read_commit,
    sha256,
)
from pipeline.run.description import read_created
from pipeline.run.plan import publish_plan
from pipeline.store import open_store
from pipeline.traces import read_manifest, seal, write_recorded_set, write_shard
from pipeline.upkeep.verify import verify
from tests.data_files import put_data
from tests.memory_store import MemoryStore
from tests.samples import (
    GEOMETRY,
    R3,
    make_plan,
    make_samples,
    make_validation_plan,
    sealed_r2,
    sealed_r3,
    train,
    without_routes,
    write_run,
)
from tests.stored_runs import SAMPLES, long_run, rewrite, whole_run


@pytest.fixture
def run(tmp_path):
    """A run with one step, one policy, one checkpoint and one validation of two shards."""
    store = open_store(str(tmp_path / "run"))
    whole_run(store, tmp_path)
    commit(store, keys.stop(0), {"reason": "finished", "message": ""}, "aaaaaaaa")
    assert not verify(store).problems
    return store


def objects(tmp_path) -> list:
    return sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file())


def named(store) -> set[str]:
    return {problem.key for problem in verify(store).problems}


def replay(**settings: object) -> dict[str, object]:
    """Return a change to the replay settings in run.json."""
    return {"config": {"actor_rollout_ref": {"actor": {"router_replay": settings}}}}


@pytest.mark.parametrize(
    ("key", "change"),
    [
        (keys.run_json(), {"inputs": {}}),
        (keys.run_json(), {"geometry": {"experts": 16}}),
        (keys.run_json(), {"name": "../second"}),
        (keys.run_json(), {"name": "red\x1b[31m"}),
        (keys.run_json(), {"versions": {"vllm": {}}}),
        (keys.run_json(), {"attempt": ["0" * 8]}),
        (keys.run_json(), replay(mode="R4")),
        (keys.run_json(), replay(mode=None)),
        (keys.run_json(), replay(mode="R3", record_file=1)),
        (keys.attempt(0), {"number": 1}),
        (keys.attempt(0), {"total_training_steps": -5}),
        (keys.attempt(0), {"start_timeout_s": "x"}),
        (keys.attempt(0), {"step_timeout_s": -1.0}),
        (keys.stop(0), {"reason": "foo"}),
        (keys.plan(0), {"prompts": 3}),
        (keys.plan(0), {"step": 1}),
        (keys.plan(0), {"sampling": {"temperature": 1}}),
        (keys.metrics(0), {"step": 1}),
        (keys.metrics(0), {"step": False}),
        (keys.metrics(0), {"metrics": None}),
        (keys.metrics(0), {"metrics": {"actor/pg_loss": "0.5"}}),
        (keys.metrics(0), {"policy_sha256": 1}),
        (keys.metrics(0), {"policy_sha256": "x"}),
        (keys.metrics(0), {"policy_version": 1}),
        (keys.metrics(0), {"layout_sha256": 1}),
        (keys.metrics(0), {"agreement_by_layer": {"1": "0.5"}}),
        (keys.policy(1), {"weights_sha256": "0" * 64}),
        (keys.policy(1), {"weights_sha256": None}),
        (keys.policy(1), {"files": [{"key": "policies/000001/x"}]}),
        (keys.policy(1), {"version": 2}),
        (keys.checkpoint(1), {"version": 2}),
        (keys.checkpoint(1), {"version": True}),
        (keys.checkpoint(1), {"step": 2}),
        (keys.checkpoint(1), {"layout": 1}),
        (keys.checkpoint(1), {"files": []}),
        (keys.validation_plan(0), {"prompts": None}),
        (keys.validation_plan(0), {"step": 1}),
        (keys.validation_plan(0), {"prompts": [{"row": row, "epoch": 1} for row in range(3)]}),
        (keys.validation_plan(0), {"policy_version": 1}),
        (keys.validation(0, 1), {"shard": 0}),
        (keys.validation(0, 1), {"count": 1}),
        (keys.validation(0, 1), {"count": 1, "masked": 1}),
        (keys.validation(0, 1), {"count": True}),
        (keys.validation(0, 1), {"masked": None}),
        (keys.validation(0, 1), {"reward_sum": 1.0}),
        (keys.validation(0, 1), {"reward_sum": {"x": 1.0}}),
        (keys.validation(0, 1), {"reward_sum": None}),
        (keys.validation(0, 1), {"reward_mean": 0.9}),
        (keys.validation(0, 1), {"reward_mean": None}),
        (keys.validation(0, 1), {"reward_mean": "1"}),
        (keys.validation(0, 1), {"time_s": "1"}),
        (keys.validation(0, 1), {"time_s": -1}),
        (keys.validation(0, 1), {"version": False}),
        (keys.validation(0, 1), {"files": []}),
    ],
)
def test_json_with_different_content_is_named(run, tmp_path, key, change):
    rewrite(tmp_path / "run" / key, change)
    # An incorrect weights digest also differs from the digest in the metrics.
    assert {key} <= named(run) <= {key, *([keys.metrics(0)] if key == keys.policy(1) else [])}


def test_changed_json_is_named(run, tmp_path):
    """Each object's own digest reveals the change, and no object may lack its digest."""
    for path in objects(tmp_path):
        content = path.read_bytes()
        body = json.loads(content) if path.suffix == ".json" else {}
        if "attempt" not in body:
            continue  # a data file
        key = path.relative_to(tmp_path / "run").as_posix()
        for changed in ({**body, "more": 1}, {**body, "attempt": "b"}):
            path.write_text(json.dumps(changed))
            with pytest.raises(CorruptObjectError, match=f"{key}.*its content has SHA-256"):
                read_commit(run, key)
            assert key in named(run)
        del body[CONTENT_SHA256]
        path.write_text(json.dumps(body))
        assert key in named(run)
        path.write_bytes(content)
    assert not verify(run).problems


@pytest.mark.parametrize("key", [keys.policy(1), keys.checkpoint(1)])
def test_files_that_are_unlisted_or_listed_twice_are_found(run, tmp_path, key):
    """A commit lists the files that its writer wrote under one write id. Other files are debris."""
    path = tmp_path / "run" / key
    body = json.loads(path.read_bytes())
    made = keys.maker_of(body["files"][0]["key"])
    more = {"key": f"{made}/more", "size": 4, "sha256": sha256(b"more")}
    run.create(more["key"], b"more")
    (problem,) = verify(run).problems
    assert (problem.key, more["key"] in problem.text) == (key, True)
    rewrite(path, {"files": [*body["files"], more]})
    assert not verify(run).problems
    run.create(f"{made[:-1]}{'1' if made[-1] == '0' else '0'}/more", b"debris")
    assert not verify(run).problems
    rewrite(path, {"files": [*body["files"], more, more]})
    assert key in named(run)


def test_routes_in_the_run_of_a_model_without_experts_are_found(run, tmp_path):
    rewrite(tmp_path / "run" / keys.run_json(), {"geometry": None})
    (problem,) = verify(run, 0).problems
    assert "the run's model has None" in problem.text


def test_samples_of_another_validation_are_found(run, tmp_path):
    """Files and counts are correct, but the plan names different samples for this shard."""
    (tmp_path / "run" / keys.validation_plan(0)).unlink()
    publish_plan(run, make_validation_plan(prompts=4))
    (problem,) = verify(run).problems
    assert problem.key == keys.validation(0, 1)
    assert "missing: val-000000/3/0, val-000000/3/1" in problem.text


def test_samples_of_a_validation_without_a_plan_are_found(run):
    run.delete(keys.validation_plan(0))
    (problem,) = verify(run).problems
    assert problem.key == keys.validation_plan(0)


def test_amendments_and_their_files_are_checked(run, tmp_path):
    """An amendment is broken, lost or out of order, or one of its files is changed."""
    mended = put_data(run, keys.input_file("2" * 64, "reward.py"), b"mended")
    model = {"inputs.model": {"model.safetensors": mended}}
    for number, changes in enumerate(({"inputs.reward": mended}, model)):
        write_amendment(run, Amendment(number, "why", 1, changes))
    report = verify(run)
    assert not report.problems
    assert mended.key in report.seen

    first = tmp_path / "run" / keys.amendment(0)
    content = first.read_bytes()
    for change in ({"number": 1}, {"changes": {"inputs.model": 1}}, {"reason": None}):
        rewrite(first, change)
        assert named(run) == {keys.amendment(0)}
        first.write_bytes(content)
    first.write_bytes(content.replace(b"why", b"who"))
    assert named(run) == {keys.amendment(0)}
    first.unlink()
    (problem,) = verify(run).problems
    assert problem.key == keys.amendment(0)
    assert problem.text == f"no such object, but {keys.amendment(1)} exists"
    first.write_bytes(content)
    rewrite(tmp_path / "run" / keys.amendment(1), {"from_step": 0})
    assert named(run) == {keys.amendment(1)}
    (tmp_path / "run" / keys.amendment(1)).unlink()
    (tmp_path / "run" / mended.key).write_bytes(b"meddled")
    assert named(run) == {mended.key}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"actor_rollout_ref.actor.router_replay.mode": "R2"}, keys.manifest(0)),
        ({"actor_rollout_ref.actor.router_replay.mode": "R4"}, keys.amendment(0)),
        ({"actor_rollout_ref.actor": {"x": 1}}, keys.amendment(0)),
        ({"trainer": {"total_training_steps": -3}}, keys.amendment(0)),
        ({".".join("x" * 3000): 1}, keys.amendment(0)),
    ],
)
def test_amended_settings_are_compared_with_the_steps(run, changes, found):
    """The amendment applies from step 0 on, and agrees with its own digest."""
    body = {"number": 0, "reason": "why", "from_step": 0, "changes": changes}
    commit(run, keys.amendment(0), body, "aaaaaaaa")
    assert found in named(run)


def test_samples_that_do_not_begin_with_their_prompts_are_found(run, tmp_path):
    """A step and a validation of a run with other prompts were put into this run's folder."""
    other = open_store(str(tmp_path / "other"))
    write_run(other, make_samples(seed=7), "R3", b"{}")
    table = other.read(read_created(other).inputs.prompts.key)
    file = put_data(run, keys.input_file("3" * 64, "prompts.parquet"), table)
    inputs = asdict(read_created(run).inputs) | {"prompts": asdict(file)}
    rewrite(tmp_path / "run" / keys.run_json(), {"inputs": inputs})
    problems = verify(run).problems
    assert len(problems) == len(SAMPLES)
    for problem in problems:
        assert problem.sample is not None
        assert "its prompt has token digest" in problem.text
    rewrite(tmp_path / "run" / keys.run_json(), {"inputs": inputs | {"val_prompts": asdict(file)}})
    found = [problem for problem in verify(run).problems if problem not in problems]
    assert {problem.key for problem in found} == {keys.validation(0, 0), keys.validation(0, 1)}
    (tmp_path / "run" / file.key).write_bytes(b"PAR1")
    assert file.key in named(run)


def test_a_single_step_is_checked_separately(run, tmp_path):
    """Damage elsewhere is not reported."""
    for path in (tmp_path / "run").rglob("*.safetensors"):
        path.unlink()
    assert named(run)
    report = verify(run, 0)
    assert not report.problems
    assert (report.steps, report.policies, report.validations) == (1, 0, 0)
    run.delete(keys.plan(0))
    assert {problem.key for problem in verify(run, 0).problems} == {keys.plan(0)}


def test_lost_metrics_are_reported_alone_and_with_all_steps(tmp_path):
    store = open_store(str(tmp_path / "long"))
    long_run(store, 5, ())
    for step in (1, 2):
        store.delete(keys.metrics(step))
    (problem,) = verify(store).problems
    assert str(problem) == (
        f"{keys.metrics(1)}: no such object, but a later step was trained: {keys.metrics(3)}"
    )
    assert [len(verify(store, step).problems) for step in range(5)] == [0, 1, 1, 0, 0]


def test_a_recorded_set_has_only_steps(run, tmp_path):
    record = open_store(str(tmp_path / "set"))
    write_recorded_set(run, record, 0)
    report = verify(record)
    assert not report.problems
    assert (report.steps, report.inputs) == (1, 0)


def test_all_shards_that_the_step_does_not_name_are_found(tmp_path):
    """There may be a gap in the numbers of the shards."""
    store = open_store(str(tmp_path))
    samples = make_samples(prompts=4)
    for shard in range(4):
        if shard != 2:
            write_shard(store, 0, shard, f"0123456{shard}", samples[2 * shard :][:2], GEOMETRY, R3)
    late = {keys.rollout(0, shard): store.read(keys.rollout(0, shard)) for shard in (1, 3)}
    for key in late:
        store.delete(key)
    seal(store, 0, 1, lambda _: [s.id for s in samples[:2]], 0)
    for key, data in late.items():
        store.create(key, data)
    [problem] = verify(store).problems
    assert problem.key == keys.manifest(0)
    assert f"it does not name the shards: {', '.join(late)}" in str(problem)


def test_a_plan_with_different_samples_is_found(tmp_path):
    """Verify compares the manifest with the step's plan."""
    store = open_store(str(tmp_path))
    sealed_r3(store, make_samples())
    publish_plan(store, make_plan())
    assert not verify(store).problems
    store.delete("steps/000000/plan.json")
    publish_plan(store, make_plan(prompts=4))
    (problem,) = verify(store).problems
    assert "missing: 000000/3/0, 000000/3/1" in problem.text


def test_a_step_that_is_trained_meanwhile_is_not_reported():
    """The trainer finishes the step between two requests of verify; each moment is tried."""
    before = MemoryStore()
    write_shard(before, 0, 0, new_write_id(), without_routes(SAMPLES), None, None)
    seal(before, 0, 1, lambda _: [sample.id for sample in SAMPLES], 0, training=True)
    after = MemoryStore(before.objects)
    train(after, SAMPLES)
    commit(after, keys.metrics(0), {"step": 0, "metrics": {}}, "a")

    class Trained(MemoryStore):
        """The step is trained after the given number of requests for sizes."""

        def __init__(self, requests: int) -> None:
            super().__init__(before.objects)
            self.requests = requests

        def size(self, key):
            found = super().size(key)
            self.requests -= 1
            if self.requests == 0:
                self.objects.update(after.objects)
            return found

    for requests in range(1, 100):
        store = Trained(requests)
        assert not verify(store).problems
        if store.requests > 0:
            break
    assert requests > 5
    lost = MemoryStore(after.objects)
    lost.delete(keys.training_set(0))
    assert [problem.key for problem in verify(lost).problems] == [keys.training_set(0)]


def test_each_training_commit_is_compared_only_with_its_own_rows():
    """Otherwise the time grows with the number of ranks times the number of samples."""
    run, record = MemoryStore(), MemoryStore()
    sealed_r2(run, SAMPLES)
    write_recorded_set(run, record, 0)
    manifest = read_manifest(record, 0)
    rows = rows_by_file(manifest)
    for stage in range(2):
        for dp_rank in range(2):
            (number,) = (
                number
                for number, ref in enumerate(manifest.files)
                if f"/training/{stage:03d}-{dp_rank:05d}." in ref.commit
            )
            expected = [sample.id for sample in SAMPLES[dp_rank::2]]
            assert [row["id"] for row in rows.pop(number)] == expected
    assert not rows
