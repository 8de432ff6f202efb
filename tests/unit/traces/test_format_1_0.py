"""Stores in format 1.0 are read, verified, exported and replayed."""

import json

import pytest

from pipeline.run import keys
from pipeline.store import open_store
from pipeline.traces import (
    open_shard,
    read_manifest,
    read_routes,
    read_samples,
    replayed_sets,
    routes_digest,
    seal,
    seal_replay,
    used_routes,
    write_recorded_set,
)
from pipeline.upkeep.export import export
from pipeline.upkeep.verify import verify
from tests.old_stores import old_digests, old_store
from tests.samples import make_samples, make_window, write_run

ALL = ("r3", "r2", "audited", "disabled", "set", "replayed")
ROUTED = tuple(name for name in ALL if name != "disabled")
RECORDED_BY_TRAINER = ("r2", "audited")


def _digests(store):
    manifest = used_routes(store, 0)
    if manifest.geometry is None:
        return dict.fromkeys(manifest.ids)
    routes = read_routes(store, manifest, manifest.ids)
    return {id: routes_digest(found, manifest.geometry) for id, found in routes.items()}


@pytest.mark.parametrize("name", ALL)
class TestOldStore:
    def test_contains_the_routes_that_training_used(self, name, tmp_path):
        assert _digests(old_store(name, tmp_path)) == old_digests(name)

    def test_contains_its_samples(self, name, tmp_path):
        store = old_store(name, tmp_path)
        manifest = read_manifest(store, 0)
        found = {sample.id: sample for sample in read_samples(store, manifest, manifest.ids)}
        assert found.keys() == {sample.id for sample in make_samples()}

    def test_is_verified_without_problems(self, name, tmp_path):
        report = verify(old_store(name, tmp_path))
        assert report.problems == []
        assert (report.steps, report.samples) == (1, 6)


@pytest.mark.parametrize("name", ROUTED)
class TestOldRoutes:
    def test_are_exported(self, name, tmp_path):
        assert export(old_store(name, tmp_path), 0, tmp_path / "out", "npy") == 6
        listed = json.loads((tmp_path / "out/samples.json").read_text())
        assert {sample["id"] for sample in listed["samples"]} == old_digests(name).keys()

    def test_are_replayed(self, name, tmp_path, monkeypatch):
        """The check that finished responses have complete routes is off: those of the old stores do
        not."""
        monkeypatch.setattr(replayed_sets, "_check_known", lambda *_: None)
        source = old_store(name, tmp_path)
        run = open_store(f"file://{tmp_path}/new")
        mode = "R3" if name == "r3" else "R2"
        write_run(run, make_samples(), mode, replay_file=source.uri)
        seal_replay(run, source, 0, make_window())
        assert _digests(run) == old_digests(name)
        assert verify(run).problems == []


@pytest.mark.parametrize("name", RECORDED_BY_TRAINER)
def test_a_recorded_set_is_made_from_an_old_step(name, tmp_path):
    target = open_store(f"file://{tmp_path}/new-set")
    write_recorded_set(old_store(name, tmp_path), target, 0)
    assert _digests(target) == old_digests(name)
    assert verify(target).problems == []
    assert target.size(keys.plan(0)) is not None


def test_a_trained_step_without_the_routes_that_its_run_records_is_found(tmp_path):
    """Only the run's settings reveal that the trainer's files are missing."""
    store = old_store("r2", tmp_path)
    for info in list(store.list(keys.trainings(0))):
        store.delete(info.key)
    (problem,) = verify(store).problems
    assert "no commits, but the step was trained, and run.json has the mode 'R2'" in problem.text


def test_verify_lists_the_impossible_checks_of_a_step_with_old_shards(tmp_path):
    """A run that is upgraded between generation and seal has old shards under a new manifest."""
    store = old_store("r3", tmp_path)
    manifest = read_manifest(store, 0)
    shards = sorted({ref.commit for ref in manifest.files})
    ids = [open_shard(store, 0, shard).ids for shard in range(len(shards))]
    for info in list(store.list(keys.step_prefix(0))):
        if "/manifest" in info.key:
            store.delete(info.key)
    seal(store, 0, len(shards), ids.__getitem__, 0)
    assert read_manifest(store, 0).format == "1.1"
    assert [note.key for note in verify(store).notes] == [keys.manifest(0)]
