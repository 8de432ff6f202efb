"""`sweep` removes old objects that no commit names, and nothing else."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline.run.amendments import Amendment, write_amendment
from pipeline.traces.replayed_sets import expected_of, seal_replay
from typer.testing import CliRunner

from pipeline.cli.traces import app
from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.store import StoreError, open_store
from pipeline.store.file import FileStore
from pipeline.traces import (
    NewTrainingSet,
    read_manifest,
    write_recorded_set,
    write_samples,
    write_shard,
)
from pipeline.upkeep.problems import Report
from pipeline.upkeep.sweep import sweep
from pipeline.upkeep.verify import verify
from tests.data_files import put_data
from tests.memory_store import MemoryStore
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
    if store.size(keys.training_set(0)) is not None:
        new = NewTrainingSet(read_manifest(store, 0), R2)
        write_stage(store, new, 0, 0, STAGES[0][1], SAMPLES)
    for key in (
        keys.manifest_rows(0, new_write_id()),
        keys.rollout_file(1, 3, new_write_id(), "routes"),
        keys.rollout_file(1, 3, new_write_id(), "samples"),
        keys.training_file(1, 0, 0, new_write_id()),
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
    assert swept(run) == set()


def test_only_debris_older_than_the_limit_is_removed(run):
    """A write id is as old as its newest file, because the first file of a long upload may be older
    than the limit."""
    attempt = new_write_id()
    old, new = (keys.checkpoint_file(2, attempt, name) for name in ("a", "b"))
    lone = keys.checkpoint_file(3, new_write_id(), "c")
    for key in (old, new, lone):
        put_data(run, key, b"state")
    assert swept(run, DAY_S) == set()
    age(run, old, 2)
    age(run, lone, 2)
    assert swept(run, DAY_S) == {lone}
    age(run, new, 2)
    assert swept(run, DAY_S) == {old, new}


def test_a_folder_with_an_upload_in_progress_is_skipped(run):
    """A shard's samples exist and are old, while its routes are still being uploaded."""
    key = keys.rollout_file(1, 0, new_write_id(), "samples")
    put_data(run, key, b"samples")
    age(run, key, 2)
    with run.upload(keys.rollout_file(1, 0, new_write_id(), "routes")) as upload:
        upload.write(b"routes")
        assert swept(run, DAY_S) == set()
        upload.finish()
    assert swept(run, DAY_S) == {key}


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


def test_inputs_stay_until_the_run_is_created(tmp_path):
    """A flow that was killed between staging and run.json finds its inputs at the next start."""
    store = open_store(str(tmp_path))
    key = keys.input_file("0" * 64, "reward.py")
    put_data(store, key, b"")
    assert swept(store) == set()
    write_run(store, SAMPLES, "R3")
    assert swept(store) == {key}


def test_inputs_of_amendments_stay(tmp_path):
    """Corrected inputs stay, and so do the inputs that they replaced. If an amendment is broken,
    all inputs stay."""
    store = open_store(str(tmp_path))
    write_run(store, SAMPLES, "R3")
    mended = put_data(store, keys.input_file("2" * 64, "prompts.parquet"), b"mended")
    debris = put_data(store, keys.input_file("3" * 64, "reward.py"), b"debris")
    write_amendment(store, Amendment(0, "mended", 0, {"inputs.prompts": mended}))
    path = tmp_path / keys.amendment(0)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"mended", b"broken"))
    report = Report(store.uri)
    assert list(sweep(store, 0.0, report)) == []
    assert [problem.key for problem in report.problems] == [keys.amendment(0)]
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
    assert len(seen) > 4
    assert not any(seen)
    assert not verify(record).problems
    debris = put_data(record, keys.rollout_file(0, 0, new_write_id(), "samples"), b"debris").key
    assert swept(record) == {debris}


def test_a_list_without_the_newest_object_is_explained():
    class Lagging(MemoryStore):
        def list(self, prefix):
            return (info for info in super().list(prefix) if info.key[:6] == "steps/")

    with pytest.raises(StoreError, match="expected the one that was just created"):
        list(sweep(Lagging(), 0.0, Report("memory://test")))


def test_objects_copied_from_a_recorded_set_stay_until_their_step_is_sealed(tmp_path):
    """A restarted flow uses these objects until the step is sealed: it finds them by their names,
    which are not random."""
    source, record, again = (open_store(str(tmp_path / name)) for name in ("run", "set", "again"))
    for store in (source, again):
        write_run(store, SAMPLES, "R3")
    sealed_r3(source, SAMPLES)
    write_recorded_set(source, record, 0)
    assert swept(record) == set()
    put_data(again, keys.replayed(0, "steps/000000/rollout/00000.0a0a0a0a.samples.parquet"), b"x")
    assert swept(again) == set()
    seal_replay(again, record, 0, make_window())
    assert expected_of(again, 0, None).kind == "R3"
    assert swept(again) == {"steps/000000/replay/rollout/00000.0a0a0a0a.samples.parquet"}
    assert not verify(again).problems


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    body = path.read_text()
    path.write_text(body.replace('"files"', '"filed"'))
    report = Report(run.uri)
    gone = {debris.key for debris in sweep(run, 0.0, report)}
    assert [problem.key for problem in report.problems] == [keys.policy(1)]
    assert not any(key.startswith("policies/000001/") for key in gone)
    assert any(key.startswith("policies/000002/") for key in gone)
    assert not any(key.startswith(keys.inputs()) for key in gone)  # the commit may name them


def test_the_base_of_a_difference_stays_without_its_commit(run):
    """Policy 3 is a difference from policy 2. The commit of policy 2 can be restored as long as the
    files of policy 2 exist."""
    run.delete(keys.policy(2))
    before = keys_of(run)
    report = Report(run.uri)
    assert not list(sweep(run, 0.0, report))
    assert [problem.key for problem in report.problems] == [keys.policy(2)]
    assert "policies/000003/policy.json is a difference from it" in report.problems[0].text
    assert keys_of(run) == before
    run.delete(keys.policy(3))  # retention also removes a difference before its base
    assert swept(run) == {
        key for key in before if key.startswith(("policies/000002/", "policies/000003/"))
    } - {keys.policy(3)}


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
    assert command("sweep", run.uri, "--older-than", "71.5h") == [
        line,
        "removed 1 objects, 5 bytes",
    ]
    (error,) = command("sweep", run.uri, "--older-than", "1 day", expect=2)
    assert "expected a number and s, m, h or d" in error
    put_data(run, key, b"12345")
    (tmp_path / "run" / keys.policy(1)).write_text("{")
    put_data(run, keys.policy_file(1, new_write_id(), "x"), b"12345")
    lines = command("sweep", run.uri, "--older-than", "0s", expect=1)
    assert lines[0].startswith(f"{key}: 5 bytes, 0 s old")
    assert lines[1].startswith(f"{keys.policy(1)}: not JSON")
    assert lines[2] == "removed 1 objects, 5 bytes"


def assert_kept(store, key: str) -> None:
    """Check that nothing is swept from the folder of a lost commit, and that this is reported."""
    before = keys_of(store)
    report = Report(store.uri)
    list(sweep(store, 0.0, report))
    (problem,) = report.problems
    assert problem.key == key
    assert problem.text.endswith("is not swept")
    folder = key.rpartition("/")[0] + "/"
    assert {k for k in before if k.startswith(folder)} <= keys_of(store)


def test_the_newest_policy_stays_without_its_commit(run):
    """Its step has finished, so its files are not the debris of an interrupted step."""
    for version in (2, 3):  # write_chain published them, but no step has finished for them
        for info in list(run.list(f"policies/{version:06d}/")):
            run.delete(info.key)
    run.delete(keys.policy(1))
    assert_kept(run, keys.policy(1))
    assert [problem.key for problem in verify(run).problems] == [keys.policy(1)]


def test_a_checkpoint_without_commit_is_debris(run):
    """The trainer writes a checkpoint after the step's metrics, and may be killed meanwhile."""
    run.delete(keys.checkpoint(1))
    assert any(key.startswith("checkpoints/000001/") for key in swept(run))


def test_inputs_stay_without_the_amendment_that_names_them(tmp_path):
    """The shards of the newest step show that there was an amendment."""
    store = open_store(str(tmp_path))
    write_run(store, SAMPLES, "R3")
    key = keys.input_file("5" * 64, "reward.py")
    put_data(store, key, b"")
    write_shard(store, 0, 0, new_write_id(), SAMPLES, GEOMETRY, R3, {"amendments": 1})
    before = keys_of(store)
    report = Report(store.uri)
    assert list(sweep(store, 0.0, report)) == []
    (problem,) = report.problems
    assert problem.key == keys.amendment(0)
    assert "was generated with 1 amendments; inputs/ is not swept" in problem.text
    assert keys_of(store) == before
    assert keys.amendment(0) in {problem.key for problem in verify(store).problems}


def test_a_trained_step_stays_without_its_manifest(run):
    run.delete(keys.manifest(0))
    assert_kept(run, keys.manifest(0))


def test_a_step_of_a_recorded_set_stays_without_its_manifest(run, tmp_path):
    """A set may contain the only copy of a run's routes."""
    record = open_store(str(tmp_path / "set"))
    write_recorded_set(run, record, 0)
    record.delete(keys.manifest(0))
    assert_kept(record, keys.manifest(0))
