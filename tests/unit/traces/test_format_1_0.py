"""Stores in format 1.0 are read, verified, exported and replayed."""

import json

import pytest

from pipeline.run import keys
from pipeline.store import open_store
from pipeline.traces import (
    read_manifest,
    read_routes,
    read_samples,
    routes_digest,
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

    def test_are_replayed(self, name, tmp_path):
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
