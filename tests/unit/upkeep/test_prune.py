"""`prune` frees space, keeps what a restart needs, and leaves a run that all commands can read."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pipeline.traces.replayed_sets import check_replay, expected_of, seal_replay
from typer.testing import CliRunner

from pipeline.cli.traces import app
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, commit, read_commit
from pipeline.store import ObjectInfo, ObjectMissingError, open_store
from pipeline.store.file import FileStore
from pipeline.traces import (
    TraceError,
    read_manifest,
    read_routes,
    read_samples,
    write_recorded_set,
)
from pipeline.upkeep.problems import Report
from pipeline.upkeep.prune import prune
from pipeline.upkeep.sweep import sweep
from pipeline.upkeep.verify import verify
from tests.samples import make_window, sealed_r2, sealed_r3, write_run
from tests.stored_runs import SAMPLES, long_run, rewrite, write_checkpoint, write_step


@pytest.fixture
def run(tmp_path) -> FileStore:
    """A run with five trained steps. A restart may begin at the checkpoint of policy 3 or 4."""
    store = open_store(str(tmp_path / "run"))
    long_run(store, 5, (3, 4))
    return store


def data_keys(store, step: int) -> set[str]:
    infos = store.list(keys.step_prefix(step))
    return {
        info.key for info in infos if info.key.endswith((".samples.parquet", ".routes.parquet"))
    }


def test_readers_say_that_a_step_was_pruned(run):
    """Readers with a manifest from before the step was pruned name the reason for a missing
    file."""
    manifest = read_manifest(run, 0)
    list(prune(run, 2))
    for read in (read_samples, read_routes):
        with pytest.raises(
            ObjectMissingError,
            match=r"steps/000000/.*because step 0 was pruned \(steps/000000/pruned\.json\)",
        ):
            read(run, manifest, manifest.ids)
    (lost, *_) = data_keys(run, 4)
    run.delete(lost)
    manifest = read_manifest(run, 4)
    read = read_samples if ".samples." in lost else read_routes
    with pytest.raises(ObjectMissingError) as caught:
        read(run, manifest, manifest.ids)
    assert "pruned" not in str(caught.value)


def test_old_steps_lose_samples_and_routes(run):
    before = {step: data_keys(run, step) for step in range(5)}
    sizes = [sum(run.size(key) for key in before[step]) for step in range(5)]
    expected = [(step, 4, sizes[step]) for step in range(3)]
    planned = [(p.step, p.files, p.size) for p in prune(run, 2, dry_run=True)]
    assert planned == expected
    assert {step: data_keys(run, step) for step in range(5)} == before
    assert [(p.step, p.files, p.size) for p in prune(run, 2)] == expected
    for step in range(5):
        assert data_keys(run, step) == (before[step] if step > 2 else set())
    report = verify(run)
    assert not report.problems
    assert (report.steps, report.pruned, report.samples) == (5, 3, 30)
    assert not list(prune(run, 2))
    swept = Report(run.uri)
    assert not list(sweep(run, 0.0, swept))
    assert not swept.problems
    # The objects that describe the step still exist.
    assert read_manifest(run, 0).rows["token_digest"].null_count == 0


def test_routes_of_the_trainer_are_also_removed(tmp_path):
    store = open_store(str(tmp_path))
    sealed_r2(store, SAMPLES)
    assert len(data_keys(store, 0)) == 5
    (pruned,) = prune(store, 0)
    assert (pruned.files, data_keys(store, 0)) == (5, set())
    assert not verify(store).problems


def test_objects_of_a_recorded_set_are_also_removed(run, tmp_path):
    record, again = open_store(str(tmp_path / "set")), open_store(str(tmp_path / "again"))
    write_recorded_set(run, record, 0)
    write_run(again, SAMPLES, "R3")
    seal_replay(again, record, 0, make_window())
    commit(again, keys.metrics(0), {"step": 0, "metrics": {}}, "a")
    write_checkpoint(again, 1)
    (pruned,) = prune(again, 0)
    assert pruned.files == 4
    assert not verify(again).problems
    assert not verify(record).problems


def damage_manifest(run) -> None:
    path = Path(run.uri.removeprefix("file://")) / keys.manifest(2)
    path.write_bytes(path.read_bytes().replace(b'"step"', b'"stop"'))


def lose_the_training_set(run) -> None:
    body = read_commit(run, keys.manifest(2))
    rewrite(Path(run.uri.removeprefix("file://")) / keys.manifest(2), {**body, "training": True})


def forge_the_mark(run) -> None:
    commit(run, keys.pruned(2), {"step": 2, "data": []}, "a")


@pytest.mark.parametrize("damage", [damage_manifest, lose_the_training_set, forge_the_mark])
def test_a_refused_call_removes_nothing(run, damage):
    """All steps are checked before the first file is removed."""
    damage(run)
    before = {info.key for info in run.list("")}
    with pytest.raises((TraceError, CorruptObjectError), match="steps/000002/"):
        list(prune(run, 2))
    assert {info.key for info in run.list("")} == before


def test_a_manifest_that_only_a_list_contains_is_explained(tmp_path):
    class Lagging(FileStore):
        def list(self, prefix):
            yield from super().list(prefix)
            yield ObjectInfo(keys.manifest(7), 3, 0.0)

    store = open_store(str(tmp_path))
    sealed_r3(store, SAMPLES)
    with pytest.raises(ObjectMissingError, match=r"steps/000007/manifest\.json .*try again"):
        list(prune(Lagging(tmp_path), 0))
    assert data_keys(store, 0)


@pytest.mark.parametrize("done", range(1, 5))
def test_a_call_killed_between_deletions_is_completed(run, tmp_path, done):
    """The marker is written before the files are deleted.

    The next call completes the work, even if it would keep the step.
    """

    class Killed(BaseException):
        pass

    class Failing(FileStore):
        left = done

        def delete(self, key: str) -> None:
            if not self.left:
                raise Killed
            self.left -= 1
            super().delete(key)

    with pytest.raises(Killed):
        list(prune(Failing(tmp_path / "run"), 2))
    assert len(data_keys(run, 0)) == 4 - done
    assert run.size(keys.pruned(0)) is not None
    assert not verify(run).problems
    begun = 0 if done < 4 else 1
    assert [pruned.step for pruned in prune(run, 5)] == [begun]
    assert not data_keys(run, begun)
    assert len(data_keys(run, begun + 1)) == 4
    assert not verify(run).problems


def test_a_call_killed_before_the_first_deletion_has_pruned_the_step(run, tmp_path):
    """As soon as the marker exists, all commands treat the step as pruned."""
    commit(run, keys.pruned(0), {"step": 0, "data": sorted(data_keys(run, 0))}, "a")
    assert verify(run).pruned == 1
    assert next(prune(run, 4)).files == 4


def test_steps_that_a_restart_needs_stay(run):
    """A restart may begin at either of the last two checkpoints: the newest may be damaged."""
    with pytest.raises(TraceError, match=r"checkpoint of policy 3 .* keep at least 2 steps"):
        list(prune(run, 1))
    assert not list(run.list(keys.pruned(0)))
    # A restart cannot begin at a checkpoint whose step has no metrics.
    write_step(run, 5)
    write_checkpoint(run, 6)
    run.delete(keys.metrics(5))
    with pytest.raises(TraceError, match=r"checkpoint of policy 3 .* keep at least 3 steps"):
        list(prune(run, 2))
    commit(run, keys.metrics(5), {"step": 5, "metrics": {}}, "a")
    assert [pruned.step for pruned in prune(run, 2)] == [0, 1, 2, 3]


def test_a_run_without_checkpoints_needs_everything(tmp_path):
    store = open_store(str(tmp_path / "run"))
    long_run(store, 2, ())
    with pytest.raises(TraceError, match=r"restart from the first step .* at least 2 steps"):
        list(prune(store, 1))
    write_checkpoint(store, 2)
    assert [pruned.step for pruned in prune(store, 1)] == [0]


def test_steps_that_the_record_file_lacks_stay(run, tmp_path):
    """An attached flow adds these steps to the record file, and needs their routes to do so."""
    record = open_store(str(tmp_path / "set"))
    record_in(run, record)
    write_recorded_set(run, record, 0)
    with pytest.raises(TraceError, match=r"step 1 is not complete in .*no such object"):
        list(prune(run, 2))
    for step in (1, 2):
        write_recorded_set(run, record, step)
    before = {info.key for info in run.list("")}
    lost = next(iter(data_keys(record, 2)))
    content = record.read(lost)
    record.delete(lost)
    with pytest.raises(TraceError, match=rf"step 2 is not complete in .*{lost}"):
        list(prune(run, 2))
    record.create(lost, content)
    commit(record, keys.pruned(1), {"step": 1, "data": []}, "a")
    with pytest.raises(TraceError, match=r"step 1 is not complete in .*were removed"):
        list(prune(run, 2))
    record.delete(keys.pruned(1))
    assert {info.key for info in run.list("")} == before
    assert len(list(prune(run, 2))) == 3
    # The attached flow checks every finished step again.
    for step in range(5):
        write_recorded_set(run, record, step)
    assert not verify(record).problems


def record_in(run, record) -> None:
    """Set the run's record_file."""
    path = Path(run.uri.removeprefix("file://")) / keys.run_json()
    config = read_commit(run, keys.run_json())["config"]
    config["actor_rollout_ref"]["actor"]["router_replay"]["record_file"] = record.uri
    rewrite(path, {"config": config})


def other_routes(sample):
    """Return a sample with the same tokens and reward but other routes."""
    sets_TLK = sample.routes.sets_TLK.copy()
    sets_TLK[:] = np.arange(sets_TLK.shape[-1]) + 3
    return replace(sample, routes=replace(sample.routes, sets_TLK=sets_TLK))


def set_with(path, mode, samples):
    """Return a recorded set whose step 0 contains the samples."""
    source, record = (open_store(f"{path}-{name}") for name in ("source", "set"))
    (sealed_r2 if mode == "R2" else sealed_r3)(source, samples)
    write_recorded_set(source, record, 0)
    return record


@pytest.mark.parametrize("mode", ["R3", "R2"])
@pytest.mark.parametrize("other", ["routes", "reward", "kind"])
def test_steps_with_other_routes_in_the_record_file_stay(tmp_path, mode, other):
    """The run's routes are the only copy if the set contains the routes of another run."""
    run = open_store(str(tmp_path / "run"))
    write_run(run, SAMPLES, mode)
    (sealed_r2 if mode == "R2" else sealed_r3)(run, SAMPLES)
    commit(run, keys.metrics(0), {"step": 0, "metrics": {}}, "a")
    write_checkpoint(run, 1)
    theirs, kind = SAMPLES, mode
    if other == "routes":
        theirs = [*SAMPLES[:-1], other_routes(SAMPLES[-1])]
    elif other == "reward":
        theirs = [*SAMPLES[:-1], replace(SAMPLES[-1], reward=0.25)]
    else:
        kind = "R2" if mode == "R3" else "R3"
    record_in(run, set_with(tmp_path / "theirs", kind, theirs))
    says = r"of kind R\d" if other == "kind" else f"beginning with sample {SAMPLES[-1].id}"
    with pytest.raises(TraceError, match=rf"step 0 is not complete in .*{says}"):
        list(prune(run, 0))
    assert data_keys(run, 0)
    record_in(run, set_with(tmp_path / "ours", mode, SAMPLES))
    assert [pruned.step for pruned in prune(run, 0)] == [0]


@pytest.mark.parametrize(
    ("mode", "theirs", "says"),
    [
        ("R3", "R2", "of kind R2"),
        ("R2", "R3", "of kind R3"),
        ("R3", "R3", f"sample {SAMPLES[-1].id}"),
    ],
)
def test_a_pruned_step_is_still_compared_with_the_set(tmp_path, mode, theirs, says):
    """A pruned step keeps the kind of its routes and, if the engine recorded them, their
    digests."""
    run = open_store(str(tmp_path / "run"))
    (sealed_r2 if mode == "R2" else sealed_r3)(run, SAMPLES)
    list(prune(run, 0))
    write_recorded_set(run, set_with(tmp_path / "same", mode, SAMPLES), 0)
    record = set_with(tmp_path / "other", theirs, [*SAMPLES[:-1], other_routes(SAMPLES[-1])])
    with pytest.raises(TraceError, match=says):
        write_recorded_set(run, record, 0)


def test_a_pruned_step_is_neither_recorded_nor_replayed(run, tmp_path):
    list(prune(run, 2))
    with pytest.raises(TraceError, match=r"its samples and routes were removed"):
        write_recorded_set(run, open_store(str(tmp_path / "set")), 1)
    with pytest.raises(TraceError, match=r"its samples and routes were removed"):
        check_replay(run, 1, expected_of(run, 1, None))


def test_damage_of_the_remaining_objects_is_found(run, tmp_path):
    """Verify still compares the manifest, rows and commits of a pruned step."""
    list(prune(run, 2))
    for path in sorted((tmp_path / "run" / "steps" / "000001").rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])
            key = path.relative_to(tmp_path / "run").as_posix()
            assert {problem.key for problem in verify(run).problems} == {key}
            path.write_bytes(content)


def command(*arguments: object, expect: int = 0) -> list[str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == expect, result.output
    return result.output.splitlines()


def test_commands_report_pruned_steps(run, tmp_path):
    """Each command reports that a step was pruned.

    A command fails only if it needs that step's routes.
    """
    (error,) = command("prune", run.uri, "--keep-steps", 1, expect=2)
    assert "keep at least 2 steps" in error
    *steps, last = command("prune", run.uri, "--keep-steps", 2, "--dry-run")
    assert [line.split(":")[0] for line in steps] == ["step 0", "step 1", "step 2"]
    assert last.startswith("would remove samples and routes of 3 steps: 12 files, ")
    *again, last = command("prune", run.uri, "--keep-steps", 2)
    assert again == steps
    assert last.startswith("removed samples and routes of 3 steps: 12 files, ")
    assert command("prune", run.uri, "--keep-steps", 2) == [
        "removed samples and routes of 0 steps: 0 files, 0 bytes"
    ]
    listed = [line.split("│")[1].strip() for line in command("ls", run.uri) if "vllm" in line]
    assert listed == ["0 (pruned)", "1 (pruned)", "2 (pruned)", "3", "4"]
    assert "step 1, pruned" in command("ls", run.uri, "--step", 1)[0]
    (good,) = command("verify", run.uri)
    assert good.startswith("all good; checked: 5 sealed steps, 3 of them pruned, 30 samples, ")
    gone = "step 1: pruned, its routes were removed"
    assert gone in command("stats", run.uri)
    assert command("stats", run.uri, "--step", 1)[0] == gone
    (error,) = command("show", run.uri, "000001/1/1", expect=2)
    assert "its samples and routes were removed (steps/000001/pruned.json)" in error
    assert gone in command("export", run.uri, "--out", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000003", "000004"]
    (error,) = command("export", run.uri, "--out", tmp_path / "one", "--step", 1, expect=2)
    assert "its samples and routes were removed" in error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: [*data, keys.manifest(0)], "it names .*manifest.json, which is not a data"),
        (lambda data: [*data, keys.rollout(0, 0)], "it names .*00000.json, which is not a data"),
        (lambda data: [*data, "steps/000001/x"], "it names steps/000001/x, which is not a data"),
        (lambda data: data[1:], "it does not name .*, which is a data file of step 0"),
        (lambda data: [*data, 1], "data: item 4: 1 is not a string"),
        (lambda data: {}, "data: {} is not a list"),
    ],
)
def test_a_mark_that_does_not_list_the_data_files_is_refused(run, tmp_path, change, says):
    """Nothing is removed because such a mark lists it."""
    list(prune(run, 2))
    path = tmp_path / "run" / keys.pruned(0)
    rewrite(path, {"data": change(json.loads(path.read_bytes())["data"])})
    before = {info.key for info in run.list("")}
    with pytest.raises(CorruptObjectError, match=says):
        list(prune(run, 5))
    assert {info.key for info in run.list("")} == before
    assert [problem.key for problem in verify(run).problems] == [keys.pruned(0)]


def test_lost_routes_of_the_trainer_that_a_mark_does_not_list_are_found(tmp_path):
    store = open_store(str(tmp_path))
    sealed_r2(store, SAMPLES)
    assert len(list(prune(store, 0))) == 1
    path = tmp_path / keys.pruned(0)
    data = json.loads(path.read_bytes())["data"]
    rewrite(path, {"data": [key for key in data if "/training/" not in key]})
    (problem,) = verify(store).problems
    assert "it does not name steps/000000/training/" in problem.text
