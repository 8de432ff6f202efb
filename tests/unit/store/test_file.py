"""The file:// store."""

import multiprocessing
import os
import shutil
import signal
import stat
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from pipeline.run.commit import CorruptObjectError, DataFile, commit, read_commit, read_data
from pipeline.run.wait import wait_for_any
from pipeline.store import ObjectExistsError, RefusedError, StoreError, open_store
from tests.store_conformance import StoreConformance


@pytest.fixture(params=["folder", "uri"])
def store(request, tmp_path):
    root = tmp_path / "a store"
    return open_store(str(root) if request.param == "folder" else root.as_uri())


class TestFileStore(StoreConformance):
    pass


def test_only_regular_files_are_listed(tmp_path):
    """Links that lead nowhere are not listed."""
    root = tmp_path / "odd"
    (root / "steps/000000").mkdir(parents=True)
    (root / "steps/000000/plan.json").write_bytes(b"{}")
    os.mkfifo(root / "steps/000000/fifo")
    (root / "zero").symlink_to("/dev/zero")
    (root / "steps/000000/nowhere").symlink_to("not-there")
    store = open_store(str(root))
    assert [info.key for info in store.list("")] == ["steps/000000/plan.json"]
    assert store.size("steps/000000/nowhere") is None


def test_a_link_to_a_folder_that_contains_it_is_an_error(tmp_path):
    store = open_store(str(tmp_path / "store"))
    store.create("steps/plan.json", b"{}")
    (tmp_path / "store/steps/up").symlink_to("..")
    with pytest.raises(StoreError, match=r"list  in .*symbolic links: .*steps/up"):
        list(store.list(""))


def test_linked_folders_are_listed_under_readable_keys(tmp_path):
    """If a step was moved to another disk, its objects keep the keys that readers use."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "plan.json").write_bytes(b"{}")
    (tmp_path / "store/steps").mkdir(parents=True)
    (tmp_path / "store/steps/000000").symlink_to(elsewhere)
    store = open_store(str(tmp_path / "store"))
    for prefix in ("", "steps/", "steps/000000/", "steps/000000/pl"):
        assert [info.key for info in store.list(prefix)] == ["steps/000000/plan.json"]
    assert store.read("steps/000000/plan.json") == b"{}"


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """A listing never silently lacks objects."""
    store = open_store(str(tmp_path))
    for key in ("a/1", "b/2", "c/3"):
        store.create(key, b"")
    scan = os.scandir

    def refused(folder):
        if Path(folder).name == "b":
            raise PermissionError(13, "Permission denied", folder)
        return scan(folder)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(RefusedError, match=r"^list  in .*Permission denied: .*/b"):
        list(store.list(""))


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_an_upload_of_an_existing_object_changes_nothing(store, size):
    with store.upload("key") as upload:
        upload.write(b"x" * size)
        store.create("key", b"first")
        with pytest.raises(ObjectExistsError, match="create key"):
            upload.finish()
    assert store.read("key") == b"first"
    assert list(store.debris("")) == []


def test_nothing_is_deleted_through_a_link_out_of_the_store(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/letter").write_bytes(b"1")
    (tmp_path / "store").mkdir()
    (tmp_path / "store/steps").symlink_to(tmp_path / "home")
    (tmp_path / "store/link").symlink_to(tmp_path / "home/letter")
    store = open_store(str(tmp_path / "store"))
    with pytest.raises(StoreError, match="leads out of the store"):
        store.delete("steps/letter")
    store.delete("link")  # the link, not its target
    assert (tmp_path / "home/letter").read_bytes() == b"1"
    assert [info.key for info in store.list("")] == ["steps/letter"]


def test_a_sparse_file_is_refused_by_its_size(tmp_path):
    store = open_store(str(tmp_path))
    with (tmp_path / "commit.json").open("wb") as file:
        file.truncate(20 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError, match=r"commit\.json .*21474836480 bytes"):
            read_commit(store, "commit.json")
        with pytest.raises(CorruptObjectError, match="its commit records 5 bytes"):
            read_data(store, DataFile("commit.json", 5, "0" * 64))
        assert tracemalloc.get_traced_memory()[1] < 1e6
    finally:
        tracemalloc.stop()


def _create_for_ever(root: str) -> None:
    store = open_store(root)
    for i in range(1_000_000):
        store.create(f"objects/{i:06d}", bytes([i % 251]) * 100_000)


def test_a_killed_creator_leaves_only_complete_objects(tmp_path):
    """After kill -9 during a write, every listed object is complete, and the half-written file is
    not an object."""
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


def test_an_error_of_the_file_system_raises_a_store_error(tmp_path):
    """There is a file where the store's folder should be, or a name is too long."""
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
def test_a_full_disk_is_reported_and_damages_no_object(small_disk, tmp_path, size):
    """Objects fill the disk, and the next object is larger than the free space. The error reports
    the full disk, committed objects are complete, half-written files are removed, and freed space
    can be used."""
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
        store.upload_file("steps/more", path)
    assert list(store.debris("")) == []
    assert [store.read(f"steps/{i}.data") for i in made] == [data] * len(made)
    assert all(read_commit(store, f"steps/{i}.json")["step"] == i for i in made)
    assert store.size(f"steps/{len(made)}.data") is None
    assert store.size("steps/more") is None
    for info in list(store.list("")):
        store.delete(info.key)
    store.create("steps/small", data[:300_000])
    assert store.read("steps/small") == data[:300_000]


def test_a_store_can_be_opened_by_its_uri(tmp_path):
    store = open_store(str(tmp_path))
    assert open_store(store.uri).uri == store.uri == tmp_path.as_uri()
    odd = open_store(str(tmp_path / "50% of #1"))
    odd.create("key", b"1")
    assert open_store(odd.uri).read("key") == b"1"
    for uri in ("gs://bucket/x", "file://other-host/x"):
        with pytest.raises(StoreError, match=r"scheme|a host"):
            open_store(uri)


def test_objects_are_readable_by_others(store, tmp_path):
    """Workers may run as different users in the same group, so the umask sets the objects'
    permissions."""
    umask = os.umask(0o027)
    try:
        store.create("key", b"1")
    finally:
        os.umask(umask)
    mode = stat.S_IMODE((tmp_path / "a store" / "key").stat().st_mode)
    assert mode == 0o640


def test_a_probe_creates_no_folder(store, tmp_path):
    store.probe()
    assert not (tmp_path / "a store").exists()
