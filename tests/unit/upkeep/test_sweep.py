"""`sweep` removes old objects that no commit names, and nothing else."""

import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pipeline.cli.traces import app
from pipeline.recorded import seal_replay, write_recorded_set
from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.store import open_store
from pipeline.store.file import FileStore
from pipeline.traces import NewTrainerRoutes, read_manifest, write_samples, write_shard
from pipeline.upkeep.problems import Report
from pipeline.upkeep.sweep import sweep
from pipeline.upkeep.verify import verify
from tests.attempts import make_attempt
from tests.data_files import put_data
from tests.policies import write_chain
from tests.samples import (
    GEOMETRY,
    R2,
    R3,
    STAGES,
    make_window,
    sealed_r2,
    sealed_r3,
    without_routes,
    write_run,
    write_shards,
    write_stage,
)
from tests.stored_runs import SAMPLES, whole_run

DAY_S = 86_400.0


@pytest.fixture(params=["R3", "R2"])
def run(request, tmp_path):
    store = open_store(str(tmp_path / "run"))
    whole_run(store, tmp_path, request.param)
    write_chain(store, 2, 2)
    return store


def keys_of(store) -> set[str]:
    return {info.key for info in store.list("")} | {info.key for info in store.debris("")}


def swept(store, older_than_s: float = 0.0, dry_run: bool = False) -> set[str]:
    """Sweep, check that no problem is reported, and return the removed keys."""
    report = Report(store.uri)
    found = [debris.key for debris in sweep(store, older_than_s, report, dry_run)]
    assert not report.problems
    assert len(found) == len(set(found))
    return set(found)


def age(store, key: str, days: float) -> None:
    """Make a file look `days` days and one second old.

    The second is necessary because a file system's clock lags behind by a tick.
    """
    path = Path(store.uri.removeprefix("file://")) / key
    at = time.time() - days * DAY_S - 1
    os.utime(path, (at, at))


def leave_debris(store) -> None:
    """Leave every kind of debris from writers that lost a race or were killed before a commit."""
    samples = without_routes(SAMPLES)
    write_shard(store, 0, 0, new_write_id(), samples, None, None)
    if store.size(keys.trainer_routes(0)) is not None:
        new = NewTrainerRoutes(read_manifest(store, 0), R2)
        write_stage(store, new, 0, 0, STAGES[0][1], SAMPLES)
    for key in (
        keys.manifest_rows(0, new_write_id()),
        keys.rollout_file(1, 3, new_write_id(), "routes"),
        keys.rollout_file(1, 3, new_write_id(), "samples"),
        keys.trainer_file(1, 0, 0, new_write_id(), 3),
        keys.policy_file(1, new_write_id(), "model.safetensors"),
        keys.policy_file(2, new_write_id(), "config.json"),
        keys.policy_file(3, new_write_id(), "difference-00001-of-00002.safetensors"),
        keys.policy_share(3, new_write_id(), 1),
        keys.checkpoint_file(1, new_write_id(), "state"),
        keys.checkpoint_file(2, new_write_id(), "state"),
        keys.input_file("2" * 64, "reward.py"),
        keys.clock(new_write_id()),
    ):
        put_data(store, key, b"debris")
    write_samples(store, keys.validation_file(0, 0, new_write_id()), samples)
    upload = store.upload(keys.rollout_file(1, 4, new_write_id(), "routes"))
    upload.write(b"debris")  # neither finished nor abandoned: its process was killed


def test_debris_of_every_kind_is_removed(run):
    """Sweep removes nothing else, so verify finds nothing missing."""
    named = keys_of(run)
    assert swept(run) == set()
    leave_debris(run)
    debris = keys_of(run) - named
    assert len(debris) >= 13
    assert swept(run, dry_run=True) == debris
    assert keys_of(run) == named | debris
    assert swept(run) == debris
    assert keys_of(run) == named
    assert not verify(run).problems


def test_only_debris_older_than_the_limit_is_removed(run):
    """A write id is as old as its newest file, because the first file of a long upload may be older
    than the limit. A folder with an upload in progress is skipped."""
    attempt = new_write_id()
    old, new = (keys.checkpoint_file(2, attempt, name) for name in ("a", "b"))
    lone = keys.checkpoint_file(3, new_write_id(), "c")
    beside = keys.rollout_file(1, 0, new_write_id(), "samples")
    for key in (old, new, lone, beside):
        put_data(run, key, b"state")
    assert swept(run, DAY_S) == set()
    for key in (old, lone, beside):
        age(run, key, 2)
    with run.upload(keys.rollout_file(1, 0, new_write_id(), "routes")) as upload:
        upload.write(b"routes")
        assert swept(run, DAY_S) == {lone}
        upload.finish()
    assert swept(run, DAY_S) == {beside}
    age(run, new, 2)
    assert swept(run, DAY_S) == {old, new}


def test_shards_of_an_unsealed_step_stay(tmp_path):
    """The shards are committed, but the step is not sealed."""
    store = open_store(str(tmp_path))
    write_run(store, SAMPLES, "R3")
    write_shards(store, SAMPLES)
    before = keys_of(store)
    assert swept(store) == set()
    write_shard(store, 0, 0, new_write_id(), SAMPLES[:1], GEOMETRY, R3)
    assert len(swept(store)) == 2
    assert keys_of(store) == before


def test_inputs_stay_until_the_run_is_created_and_while_an_attempt_names_them(tmp_path):
    """A flow that was killed between staging and run.json finds its inputs at the next start. If an
    attempt is broken, all inputs stay."""
    store = open_store(str(tmp_path))
    mended = put_data(store, keys.input_file("2" * 64, "prompts.parquet"), b"mended")
    debris = put_data(store, keys.input_file("3" * 64, "reward.py"), b"debris")
    assert swept(store) == set()
    write_run(store, SAMPLES, "R3")
    make_attempt(store, 0, steps=1, changes={"inputs.prompts": asdict(mended)})
    path = tmp_path / keys.attempt(0)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"prompts.parquet", b"prompts.parquer"))
    report = Report(store.uri)
    assert list(sweep(store, 0.0, report)) == []
    assert any(keys.attempt(0) in str(problem) for problem in report.problems)
    path.write_bytes(content)
    assert swept(store) == {debris.key}
    assert not verify(store).problems


@pytest.mark.parametrize("mode", ["R3", "R2"])
def test_files_of_a_set_stay_until_their_step_is_sealed(tmp_path, mode):
    """A killed call left old files, and a restarted call uses them under the same names."""
    run, record = (open_store(str(tmp_path / name)) for name in ("run", "set"))
    (sealed_r2 if mode == "R2" else sealed_r3)(run, SAMPLES)
    seen = []

    class Watched(FileStore):
        def create(self, key, data) -> None:
            super().create(key, data)
            if self.size(keys.manifest(0)) is None:
                seen.append(swept(record))

    write_recorded_set(run, Watched(tmp_path / "set"), 0)
    assert seen
    assert not any(seen)
    debris = put_data(record, keys.rollout_file(0, 0, new_write_id(), "samples"), b"debris").key
    assert swept(record) == {debris}
    assert not verify(record).problems


def test_objects_copied_from_a_recorded_set_stay_until_their_step_is_sealed(tmp_path):
    """A restarted flow uses these objects until the step is sealed: it finds them by their names,
    which are not random."""
    source, again = (open_store(str(tmp_path / name)) for name in ("run", "again"))
    sealed_r3(source, SAMPLES)
    write_run(again, SAMPLES, "R3")
    left = keys.replayed(0, keys.rollout_file(0, 0, "0a0a0a0a", "samples"))
    put_data(again, left, b"x")
    assert swept(again) == set()
    seal_replay(again, source, 0, make_window())
    assert swept(again) == {left}
    assert not verify(again).problems


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_damaged_commits_are_not_trusted(run, data):
    """One bit of a JSON object is flipped. Sweep then removes no file of the undamaged run."""
    root = Path(run.uri.removeprefix("file://"))
    path = data.draw(st.sampled_from(sorted(root.rglob("*.json"))))
    content = path.read_bytes()
    flipped = bytearray(content)
    flipped[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(flipped)
    try:
        report = Report(run.uri)
        assert not list(sweep(run, 0.0, report, dry_run=True)), path.name
    finally:
        path.write_bytes(content)


def test_a_damaged_folder_does_not_protect_other_folders(run, tmp_path):
    """Files that the damaged commit may have named stay.

    Debris in other folders is removed, except inputs, which the commit may also have named. The
    damaged commit is reported.
    """
    leave_debris(run)
    path = tmp_path / "run" / keys.policy(1)
    path.write_text(path.read_text().replace('"files"', '"filed"'))
    report = Report(run.uri)
    gone = {debris.key for debris in sweep(run, 0.0, report)}
    assert [problem.key for problem in report.problems] == [keys.policy(1)]
    assert not any(key.startswith(("policies/000001/", keys.inputs())) for key in gone)
    assert any(key.startswith("policies/000002/") for key in gone)


def assert_kept(store, key: str) -> None:
    """Check that nothing is swept from the folder of a lost commit, and that this is reported."""
    folder = key.rpartition("/")[0] + "/"
    before = {k for k in keys_of(store) if k.startswith(folder)}
    report = Report(store.uri)
    list(sweep(store, 0.0, report))
    assert [problem.key for problem in report.problems] == [key]
    assert before <= keys_of(store)
    assert key in {problem.key for problem in verify(store).problems}


def test_files_of_lost_commits_stay(run, tmp_path):
    """Other objects show that the commit existed, and it can be restored while its files exist."""
    record = open_store(str(tmp_path / "set"))
    write_recorded_set(run, record, 0)
    record.delete(keys.manifest(0))
    assert_kept(record, keys.manifest(0))
    manifest = run.read(keys.manifest(0))
    run.delete(keys.manifest(0))
    assert_kept(run, keys.manifest(0))
    run.create(keys.manifest(0), manifest)
    run.delete(keys.policy(2))  # policy 3 is a difference from it
    assert_kept(run, keys.policy(2))
    run.delete(keys.policy(3))  # retention also removes a difference before its base
    assert {key.split("/")[1] for key in swept(run)} == {"000002", "000003"}
    run.delete(keys.policy(1))  # its step has finished
    assert_kept(run, keys.policy(1))


def test_a_checkpoint_without_commit_is_debris(run):
    """The trainer writes a checkpoint after the step's metrics, and may be killed meanwhile."""
    run.delete(keys.checkpoint(1))
    assert any(key.startswith("checkpoints/000001/") for key in swept(run))


def command(*arguments: object, expect: int = 0) -> list[str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == expect, result.output
    return result.output.splitlines()


def test_the_command_removes_debris(run, tmp_path):
    assert command("sweep", run.uri) == ["removed 0 objects, 0 bytes"]
    key = keys.policy_file(2, new_write_id(), "x")
    put_data(run, key, b"12345")
    age(run, key, 3)
    line = f"{key}: 5 bytes, 3 d old, no commit names it"
    assert command("sweep", run.uri, "--dry-run") == [line, "would remove 1 objects, 5 bytes"]
    assert command("sweep", run.uri, "--older-than", "4d") == ["removed 0 objects, 0 bytes"]
    assert command("sweep", run.uri, "--older-than", "71.5h")[0] == line
    (error,) = command("sweep", run.uri, "--older-than", "1 day", expect=2)
    assert "expected a number and s, m, h or d" in error
    (tmp_path / "run" / keys.policy(1)).write_text("{")
    put_data(run, keys.policy_file(1, new_write_id(), "x"), b"12345")
    lines = command("sweep", run.uri, "--older-than", "0s", expect=1)
    assert lines[0].startswith(f"{keys.policy(1)}: ")
    assert lines[1] == "removed 0 objects, 0 bytes"
