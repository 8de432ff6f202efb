"""`sweep` removes what nobody names and everybody has forgotten, and nothing else."""

import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from pipeline.cli.traces import app
from pipeline.run import keys
from pipeline.run.amendments import Amendment, write_amendment
from pipeline.run.commit import new_write_id
from pipeline.store import open_store
from pipeline.traces import (
    NewTrainingSet,
    read_manifest,
    write_recorded_set,
    write_samples,
    write_shard,
)
from pipeline.traces.recorded_sets import expected_of, seal_replay
from pipeline.upkeep.problems import Report
from pipeline.upkeep.sweep import sweep
from pipeline.upkeep.verify import verify
from tests.data_files import put_data
from tests.samples import (
    GEOMETRY,
    R2,
    R3,
    STAGES,
    make_window,
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
    return store


def keys_of(store) -> set[str]:
    return {info.key for info in store.list("")} | {info.key for info in store.debris("")}


def swept(store, older_than_s: float = 0.0, dry_run: bool = False) -> set[str]:
    """Sweep without a problem; the keys that went."""
    report = Report(store.uri)
    found = [debris.key for debris in sweep(store, older_than_s, report, dry_run)]
    assert not report.problems
    assert len(found) == len(set(found))
    return set(found)


def age(store, key: str, days: float) -> None:
    """Make a file older, by a second more than that: a file system's clock lags by a tick."""
    path = Path(store.uri.removeprefix("file://")) / key
    at = time.time() - days * DAY_S - 1
    os.utime(path, (at, at))


def leave_debris(store) -> None:
    """Of every kind: losers of races, makers that were killed before their commit."""
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
        keys.checkpoint_file(1, new_write_id(), "state"),
        keys.checkpoint_file(2, new_write_id(), "state"),
        keys.input_file("2" * 64, "reward.py"),
        keys.clock(new_write_id()),
    ):
        put_data(store, key, b"debris")
    write_samples(store, keys.validation_file(0, 0, new_write_id()), samples)
    upload = store.upload(keys.rollout_file(1, 4, new_write_id(), "routes"))
    upload.write(b"debris")  # never finished, never left: its process was killed


def test_debris_of_every_kind_goes(run):
    """And nothing else: what is left is the run as it was, and verify finds nothing missing."""
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


def test_only_what_is_older_than_the_limit(run):
    """By the newest file of an attempt: the first of a long upload may be older than the limit."""
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


def test_a_folder_that_is_being_written_to_is_left_alone(run):
    """A shard's samples are there and old, its routes are still on their way."""
    key = keys.rollout_file(1, 0, new_write_id(), "samples")
    put_data(run, key, b"samples")
    age(run, key, 2)
    with run.upload(keys.rollout_file(1, 0, new_write_id(), "routes")) as upload:
        upload.write(b"routes")
        assert swept(run, DAY_S) == set()
        upload.finish()
    assert swept(run, DAY_S) == {key}


def test_shards_of_a_step_in_the_making_stay(tmp_path):
    """Committed, not sealed."""
    store = open_store(str(tmp_path))
    write_shards(store, SAMPLES)
    before = keys_of(store)
    assert swept(store) == set()
    write_shard(store, 0, 0, new_write_id(), SAMPLES[:1], GEOMETRY, R3)
    assert len(swept(store)) == 2
    assert keys_of(store) == before


def test_inputs_stay_until_the_run_is_created(tmp_path):
    """A flow that was killed between staging and run.json finds them when it is started again."""
    store = open_store(str(tmp_path))
    key = keys.input_file("0" * 64, "reward.py")
    put_data(store, key, b"")
    assert swept(store) == set()
    write_run(store, SAMPLES, "R3")
    assert swept(store) == {key}


def test_inputs_of_amendments_stay(tmp_path):
    """Mended ones, and those that they took the place of; nothing while an amendment is broken."""
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


def test_objects_taken_over_from_a_recorded_set(tmp_path):
    """Their names are not random: as long as the step is not sealed, a restarted flow uses them."""
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
def test_damaged_commits_are_not_believed(run, data):
    """A flipped bit in any JSON object, or its loss: no file of the undamaged run goes because of
    it, but those of a policy or checkpoint whose commit is lost, as if it were pruned."""
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


def test_a_damaged_folder_does_not_save_others(run, tmp_path):
    """What its commit may have named stays, debris elsewhere goes, the problem is told."""
    leave_debris(run)
    path = tmp_path / "run" / keys.policy(1)
    body = path.read_text()
    path.write_text(body.replace('"files"', '"filed"'))
    report = Report(run.uri)
    gone = {debris.key for debris in sweep(run, 0.0, report)}
    assert [problem.key for problem in report.problems] == [keys.policy(1)]
    assert not any(key.startswith("policies/000001/") for key in gone)
    assert any(key.startswith("policies/000002/") for key in gone)


def command(*arguments: object, expect: int = 0) -> list[str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == expect, result.output
    return result.output.splitlines()


def test_command(run, tmp_path):
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
