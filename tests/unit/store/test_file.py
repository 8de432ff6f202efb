"""The file:// store."""

import multiprocessing
import os
import shutil
import signal
import stat
import subprocess

import pytest

from pipeline.run.commit import commit, read_commit
from pipeline.run.wait import wait_for_any
from pipeline.store import RefusedError, StoreError, open_store
from tests.store_conformance import StoreConformance


@pytest.fixture(params=["folder", "uri"])
def store(request, tmp_path):
    root = tmp_path / "a store"
    return open_store(str(root) if request.param == "folder" else root.as_uri())


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


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("needs root and `mount`, for a small file system")
    done = subprocess.run(mount, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs a small file system: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("size", [300_000, 2_000_000])
def test_a_full_disk(small_disk, tmp_path, size):
    """The disk is filled by objects, then by one that is larger than what is left: the error says
    so, what was committed is whole, nothing half-written is left, and freed space can be used."""
    store = open_store(str(small_disk / "store"))
    data = os.urandom(size)
    path = tmp_path / "local"
    path.write_bytes(data)
    made = []

    def fill() -> None:
        for i in range(20):
            commit(store, f"steps/{i}.json", {"step": i}, "aaaaaaaa")
            store.create(f"steps/{i}.data", data)
            made.append(i)

    with pytest.raises(RefusedError, match=r"No space left on device.*free some space"):
        fill()
    with pytest.raises(StoreError, match="No space left on device"):
        store.create_from_file("steps/more", path)
    assert list(store.debris("")) == []
    assert [store.read(f"steps/{i}.data") for i in made] == [data] * len(made)
    assert all(read_commit(store, f"steps/{i}.json")["step"] == i for i in made)
    assert store.size(f"steps/{len(made)}.data") is None
    assert store.size("steps/more") is None
    for info in list(store.list("")):
        store.delete(info.key)
    store.create("steps/small", data[:300_000])
    assert store.read("steps/small") == data[:300_000]


def test_uris(tmp_path):
    store = open_store(str(tmp_path))
    assert open_store(store.uri).uri == store.uri == tmp_path.as_uri()
    odd = open_store(str(tmp_path / "50% of #1"))
    odd.create("key", b"1")
    assert open_store(odd.uri).read("key") == b"1"
    for uri in ("gs://bucket/x", "file://other-host/x"):
        with pytest.raises(StoreError, match=r"scheme|a host"):
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
