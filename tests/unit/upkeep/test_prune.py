"""`prune` frees space, keeps what a restart needs, and leaves a run that all commands can read."""

import pytest
from typer.testing import CliRunner

from pipeline.cli.traces import app
from pipeline.recorded import seal_replay, write_recorded_set
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, commit, read_commit
from pipeline.store import ObjectMissingError, open_store
from pipeline.store.file import FileStore
from pipeline.traces import TraceError, read_manifest, read_routes, read_samples
from pipeline.upkeep.problems import Report
from pipeline.upkeep.prune import prune
from pipeline.upkeep.sweep import sweep
from pipeline.upkeep.verify import verify
from tests.samples import make_window, sealed_r2, write_run
from tests.stored_runs import SAMPLES, long_run, put_signed, write_checkpoint, write_step


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
        with pytest.raises(ObjectMissingError, match=r"\(steps/000000/pruned\.json\)"):
            read(run, manifest, manifest.ids)
    for lost in data_keys(run, 4):
        run.delete(lost)
    with pytest.raises(ObjectMissingError) as caught:
        read_samples(run, manifest := read_manifest(run, 4), manifest.ids)
    assert "pruned" not in str(caught.value)


def test_old_steps_lose_samples_and_routes(run):
    before = {step: data_keys(run, step) for step in range(5)}
    sizes = [sum(run.size(key) for key in before[step]) for step in range(5)]
    expected = [(step, 4, sizes[step]) for step in range(3)]
    assert [(p.step, p.files, p.size) for p in prune(run, 2, dry_run=True)] == expected
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


def test_routes_of_the_trainer_and_of_a_recorded_set_are_also_removed(run, tmp_path):
    store, again = (open_store(str(tmp_path / name)) for name in ("r2", "again"))
    sealed_r2(store, SAMPLES)
    (pruned,) = prune(store, 0)
    assert (pruned.files, data_keys(store, 0)) == (5, set())
    write_run(again, SAMPLES, "R3")
    seal_replay(again, run, 0, make_window())
    commit(again, keys.metrics(0), {"step": 0, "metrics": {}}, "a")
    write_checkpoint(again, 1)
    (pruned,) = prune(again, 0)
    assert pruned.files == 4
    assert not [*verify(store).problems, *verify(again).problems, *verify(run).problems]


@pytest.mark.parametrize(
    ("key", "change"),
    [
        (keys.manifest(2), {"step": 7}),
        (keys.manifest(2), {"training": True}),  # training.json is missing
        (keys.pruned(2), {"step": 2, "data": []}),
        (keys.pruned(2), {"step": 2, "data": ["steps/000001/x"]}),
        (keys.pruned(2), {"step": 2, "data": 1}),
    ],
)
def test_a_refused_call_removes_nothing(run, key, change):
    """All steps are checked before the first file is removed."""
    put_signed(run, key, {**(read_commit(run, key) if run.size(key) else {}), **change})
    before = {info.key for info in run.list("")}
    with pytest.raises((TraceError, CorruptObjectError), match="steps/000002/"):
        list(prune(run, 2))
    assert {info.key for info in run.list("")} == before
    assert verify(run).problems


@pytest.mark.parametrize("done", [0, 1, 3, 4])
def test_a_call_killed_between_deletions_is_completed(run, tmp_path, done):
    """The marker is written before the files are deleted. As soon as it exists, the step is
    pruned, and the next call completes the work, even if it would keep the step."""

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
    report = verify(run)
    assert not report.problems
    assert report.pruned >= 1
    begun = 0 if done < 4 else 1
    assert [pruned.step for pruned in prune(run, 5)] == [begun]
    assert not data_keys(run, begun)
    assert len(data_keys(run, begun + 1)) == 4
    assert not verify(run).problems


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
    with pytest.raises(TraceError, match=r"first step .* at least 2 steps"):
        list(prune(store, 1))
    write_checkpoint(store, 2)
    assert [pruned.step for pruned in prune(store, 1)] == [0]


def test_steps_that_the_record_file_lacks_stay(run, tmp_path):
    """An attached flow adds these steps to the record file, and needs their routes to do so. A step
    of another run with this number does not count."""
    record = open_store(str(tmp_path / "set"))
    config = read_commit(run, keys.run_json())["config"]
    config["actor_rollout_ref"]["actor"]["router_replay"]["record_file"] = record.uri
    put_signed(run, keys.run_json(), {**read_commit(run, keys.run_json()), "config": config})
    for step in (0, 2):
        write_recorded_set(run, record, step)
    other = open_store(str(tmp_path / "other"))
    write_step(other, 1)
    write_recorded_set(other, record, 1)
    with pytest.raises(TraceError, match="step 1 is not complete in"):
        list(prune(run, 2))
    for info in list(record.list(keys.step_prefix(1))):
        record.delete(info.key)
    write_recorded_set(run, record, 1)
    (lost, *_) = data_keys(record, 2)
    content = record.read(lost)
    record.delete(lost)
    with pytest.raises(TraceError, match=rf"step 2 is not complete in .*{lost}"):
        list(prune(run, 2))
    record.create(lost, content)
    commit(record, keys.pruned(1), {"step": 1, "data": []}, "a")
    with pytest.raises(TraceError, match=r"step 1 is not complete in .*were removed"):
        list(prune(run, 2))
    record.delete(keys.pruned(1))
    assert len(data_keys(run, 0)) == 4
    assert len(list(prune(run, 2))) == 3
    # The attached flow checks every finished step again.
    for step in range(5):
        write_recorded_set(run, record, step)
    assert not verify(record).problems


def test_damage_of_the_remaining_objects_is_found(run):
    """Verify still compares the manifest, rows and commits of a pruned step."""
    list(prune(run, 2))
    for info in list(run.list(keys.step_prefix(1))):
        content = run.read(info.key)
        run.delete(info.key)
        run.create(info.key, content[: len(content) // 2])
        assert info.key in {problem.key for problem in verify(run).problems}
        run.delete(info.key)
        run.create(info.key, content)


def command(*arguments: object, expect: int = 0) -> list[str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == expect, result.output
    return result.output.splitlines()


def test_commands_report_pruned_steps(run, tmp_path):
    """A command fails only if it needs the routes of a pruned step."""
    (error,) = command("prune", run.uri, "--keep-steps", 1, expect=2)
    assert "keep at least 2 steps" in error
    *steps, last = command("prune", run.uri, "--keep-steps", 2, "--dry-run")
    assert [line.split(":")[0] for line in steps] == ["step 0", "step 1", "step 2"]
    assert "3 steps: 12 files" in last
    assert command("prune", run.uri, "--keep-steps", 2)[:-1] == steps
    assert "0 steps: 0 files" in command("prune", run.uri, "--keep-steps", 2)[0]
    listed = [line.split("│")[1].strip() for line in command("ls", run.uri) if "vllm" in line]
    assert listed == ["0 (pruned)", "1 (pruned)", "2 (pruned)", "3", "4"]
    assert "step 1, pruned" in command("ls", run.uri, "--step", 1)[0]
    (good,) = command("verify", run.uri)
    assert good.startswith("all good; checked: 5 sealed steps, 3 of them pruned, 30 samples, ")
    gone = "step 1: pruned, its routes were removed"
    assert gone in command("stats", run.uri)
    assert gone in command("export", run.uri, "--out", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["000003", "000004"]
    for arguments in (("show", run.uri, "000001/1/1"), ("export", run.uri, "--step", 1)):
        more = ["--out", tmp_path / "one"] if arguments[0] == "export" else []
        (error,) = command(*arguments, *more, expect=2)
        assert "its samples and routes were removed" in error
