"""`verify` reads everything that a run's commits name, and calls what is wrong by its own name."""

import json

import pytest

from pipeline.store import keys, open_store
from pipeline.store.commit import CONTENT_SHA256, CorruptObjectError, commit, read_commit
from pipeline.traces import write_record_set
from pipeline.traces.verify import verify
from tests.unit.traces.make import make_plan
from tests.unit.traces.runs import rewrite, whole_run


@pytest.fixture
def run(tmp_path):
    """A run of one step, one policy, one checkpoint and one validation of two shards."""
    store = open_store(str(tmp_path / "run"))
    whole_run(store, tmp_path)
    assert not verify(store).problems
    return store


def objects(tmp_path) -> list:
    return sorted(path for path in (tmp_path / "run").rglob("*") if path.is_file())


def named(store) -> set[str]:
    return {problem.key for problem in verify(store).problems}


def test_every_object_that_is_not_json_is_named(run, tmp_path):
    """Each in turn; nothing else is blamed, but that inputs of a broken run.json are not known."""
    for path in objects(tmp_path):
        content = path.read_bytes()
        path.write_bytes(b"{" if path.suffix == ".json" else content[:-1] + b"\xff")
        key = path.relative_to(tmp_path / "run").as_posix()
        assert named(run) == {key}
        path.write_bytes(content)


def test_every_object_that_is_lost_is_named(run, tmp_path):
    """But for commits without which a run is a run: an unfinished one, or one that was pruned."""
    for path in objects(tmp_path):
        key = path.relative_to(tmp_path / "run").as_posix()
        content = path.read_bytes()
        path.unlink()
        may_go = key.startswith(("policies/", "checkpoints/", "validations/", "attempts/"))
        optional = key.endswith(".json") and may_go and not key.endswith("config.json")
        optional |= key == keys.metrics(0)
        assert named(run) == (set() if optional else {key})
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("key", "change"),
    [
        (keys.run_json(), {"inputs": {}}),
        (keys.run_json(), {"geometry": {"experts": 16}}),
        (keys.plan(0), {"prompts": 3}),
        (keys.plan(0), {"step": 1}),
        (keys.metrics(0), {"step": 1}),
        (keys.policy(1), {"sha256": "0" * 64}),
        (keys.policy(1), {"files": [{"key": "policies/000001/x"}]}),
        (keys.policy(1), {"version": 2}),
        (keys.checkpoint(1), {"version": 2}),
        (keys.validation_plan(0), {"prompts": None}),
        (keys.validation_plan(0), {"step": 1}),
        (keys.validation_plan(0), {"policy_version": 1}),
        (keys.validation(0, 1), {"shard": 0}),
        (keys.validation(0, 1), {"count": 1}),
        (keys.validation(0, 1), {"files": []}),
    ],
)
def test_json_that_says_something_else_is_named(run, tmp_path, key, change):
    rewrite(tmp_path / "run" / key, change)
    assert named(run) == {key}


def test_json_that_was_changed_is_named(run, tmp_path):
    """Each object's own digest tells, and none may be without."""
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


def test_samples_of_another_validation_are_found(run, tmp_path):
    """Files and counts are right, but not what the plan asks of this shard."""
    (tmp_path / "run" / keys.validation_plan(0)).unlink()
    commit(run, keys.validation_plan(0), make_plan(prompts=4), "a")
    (problem,) = verify(run).problems
    assert problem.key == keys.validation(0, 1)
    assert "missing: val-000000/3/0, val-000000/3/1" in problem.text


def test_a_single_step_is_checked_alone(run, tmp_path):
    """Damage elsewhere is not its problem."""
    for path in (tmp_path / "run").rglob("*.safetensors"):
        path.unlink()
    assert named(run)
    report = verify(run, 0)
    assert not report.problems
    assert (report.steps, report.policies, report.validations) == (1, 0, 0)


def test_a_record_set_has_steps_only(run, tmp_path):
    record = open_store(str(tmp_path / "set"))
    write_record_set(run, record, 0)
    report = verify(record)
    assert not report.problems
    assert (report.steps, report.inputs) == (1, 0)
