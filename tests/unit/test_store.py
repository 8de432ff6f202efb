"""The file:// store, and the names of objects."""

import multiprocessing
import os
import signal
import stat

import pytest

from pipeline.store import StoreError, keys, open_store
from pipeline.store.commit import new_attempt
from pipeline.store.wait import wait_for_any
from tests.store_conformance import StoreConformance


@pytest.fixture(params=["folder", "uri"])
def new_store(request, tmp_path):
    def make():
        root = tmp_path / new_attempt() / "a store"
        return open_store(str(root) if request.param == "folder" else root.as_uri())

    return make


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "a store"))


class TestFileStore(StoreConformance):
    pass


def _create_for_ever(root: str) -> None:
    store = open_store(root)
    for i in range(1_000_000):
        store.create(f"objects/{i:06d}", bytes([i % 251]) * 100_000)


def test_a_killed_creator_leaves_whole_objects(tmp_path):
    """kill -9 in the middle of writing: every listed object is complete, and what the killed
    process left half-written is no object."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_create_for_ever, args=(str(tmp_path),))
    process.start()
    store = open_store(str(tmp_path))
    wait_for_any(store, [f"objects/{20:06d}"], 300, "the creator")
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    listed = list(store.list(""))
    assert len(listed) > 20
    assert all(info.size == 100_000 for info in listed)
    for i, info in enumerate(listed):
        assert store.read(info.key) == bytes([i % 251]) * 100_000


def test_what_the_file_system_refuses_is_a_store_error(tmp_path):
    """A file where the store's folder should be; names that are too long."""
    (tmp_path / "file").write_bytes(b"")
    store = open_store(str(tmp_path / "file"))
    with pytest.raises(StoreError, match="create key"):
        store.create("key", b"")
    with pytest.raises(StoreError, match="create x"):
        open_store(str(tmp_path)).create("x" * 1000, b"")


def test_uris(tmp_path):
    store = open_store(str(tmp_path))
    assert open_store(store.uri).uri == store.uri == tmp_path.as_uri()
    odd = open_store(str(tmp_path / "50% of #1"))
    odd.create("key", b"1")
    assert open_store(odd.uri).read("key") == b"1"
    for uri in ("gs://bucket/x", "file://other-host/x"):
        with pytest.raises(StoreError, match="scheme"):
            open_store(uri)


def test_objects_are_readable_by_others(store, tmp_path):
    """Workers may run as other users of the same group: objects get the umask's permissions."""
    umask = os.umask(0o027)
    try:
        store.create("key", b"1")
    finally:
        os.umask(umask)
    mode = stat.S_IMODE((tmp_path / "a store" / "key").stat().st_mode)
    assert mode == 0o640


def test_probing_makes_no_folder(store, tmp_path):
    store.probe()
    assert not (tmp_path / "a store").exists()


def test_numbers_of_keys():
    """Only the commit objects of a numbered folder have a number."""
    assert keys.number_of(keys.plan(3)) == 3
    assert keys.number_of(keys.metrics(123456)) == 123456
    assert keys.number_of(keys.policy(7)) == 7
    assert keys.number_of(keys.checkpoint(10)) == 10
    for key in (keys.run_json(), keys.rollout(3, 1), keys.training(3, 0, 1), keys.attempt(1)):
        assert keys.number_of(key) is None
    assert keys.number_of(keys.replayed(3, keys.rollout(3, 1))) is None


def test_replayed_objects_stay_below_their_step():
    key = keys.replayed(3, keys.training(3, 0, 1))
    assert key == "steps/000003/replay/training/000-00001.json"
