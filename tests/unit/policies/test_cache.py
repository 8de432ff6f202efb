"""The engines on a machine share one copy of a policy, and never read a partly changed copy."""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from pipeline.policies import cache as cache_module
from pipeline.policies.cache import PolicyCache
from pipeline.policies.prefetch import Prefetch
from pipeline.policies.versions import publish_policy, read_version
from pipeline.run import keys
from pipeline.run.commit import read_commit
from pipeline.store import RefusedError, StoreError, open_store
from tests.memory_store import MemoryStore
from tests.paths import ROOT
from tests.patience import PATIENCE_S
from tests.policies import write_chain
from tests.weights import digest_of, some_weights


@pytest.fixture
def store(tmp_path):
    """A run with policies 0 to 3."""
    store = open_store(str(tmp_path / "run"))
    for version in range(4):
        publish(store, version, tmp_path)
    return store


def publish(store, version, folder, seed=None):
    source = folder / "source"
    source.mkdir(exist_ok=True)
    (source / "model.safetensors").write_bytes(some_weights(version if seed is None else seed))
    publish_policy(store, version, source)


def content(held):
    return (held.folder / "model.safetensors").read_bytes()


def reads(store, monkeypatch):
    """Return a list to which every later read of the store adds its key."""
    found, read_range = [], type(store).read_range

    def read(self, key, *where):
        found.append(key)
        return read_range(self, key, *where)

    monkeypatch.setattr(type(store), "read_range", read)
    return found


def test_engines_share_one_copy(store, tmp_path, monkeypatch):
    """Each version is read from the store once; the last engine that leaves removes the copy."""
    fetched = reads(store, monkeypatch)
    one, other = PolicyCache(store, tmp_path / "root"), PolicyCache(store, tmp_path / "root")
    for version in range(3):
        for engine in (one, other):
            with engine.held(version) as held:
                assert (held.version, content(held)) == (version, some_weights(version))
                stored = read_commit(store, keys.policy(version))
                assert held.weights == stored["weights_sha256"]
            seconds = engine.loaded(version)
            assert (seconds > 0) == (engine is one)
    assert len(fetched) == 3
    one.close()
    with other.held(2) as held:
        assert content(held) == some_weights(2)
    other.close()
    assert list((tmp_path / "root").iterdir()) == []


def test_a_version_that_an_engine_has_yet_to_load_is_kept(store, tmp_path, monkeypatch):
    """The shared copy changes only after every engine has loaded the version or has left."""
    monkeypatch.setattr(cache_module, "PATIENCE_S", 0.3)
    with closing(PolicyCache(store, tmp_path)) as fast:
        slow = PolicyCache(store, tmp_path)
        assert fast.fetch(0)
        fast.loaded(0)
        assert not fast.fetch(1)  # `slow` has not loaded version 0 yet
        with slow.held(0):
            pass
        slow.loaded(0)
        assert fast.fetch(1)
        fast.loaded(1)
        assert not fast.fetch(2)
        started = time.monotonic()
        with fast.held(2) as own:
            assert time.monotonic() - started > 0.3
            assert content(own) == some_weights(2)
            with slow.held(1) as shared:
                assert content(shared) == some_weights(1)
                assert shared.folder != own.folder
        assert not own.folder.exists()
        slow.close()
        assert fast.fetch(2)


def test_a_version_older_than_the_copy_is_fetched_separately(store, tmp_path):
    """A validation, or an engine that starts late, may need an older version than the others."""
    with (
        closing(PolicyCache(store, tmp_path)) as one,
        closing(PolicyCache(store, tmp_path)) as late,
    ):
        assert one.fetch(3)
        with late.held(1) as held:
            assert content(held) == some_weights(1)
        assert not one.fetch(1)
        with one.held(3) as held:
            assert content(held) == some_weights(3)


def test_engines_that_skip_a_version_do_not_block_others(store, tmp_path, monkeypatch):
    """Two engines had no shard of the previous step and need the next version; a third is idle."""
    monkeypatch.setattr(cache_module, "PATIENCE_S", 5.0)
    with ExitStack() as stack:
        root = tmp_path / "root"
        busy, *idle = (stack.enter_context(closing(PolicyCache(store, root))) for _ in range(4))
        for engine in (busy, *idle):
            with engine.held(0):
                engine.loaded(0)
        with busy.held(1):
            busy.loaded(1)
        assert not busy.fetch(2)
        idle[2].needs(2)
        fetched = reads(store, monkeypatch)
        held: list[int] = []

        def load(engine):
            with engine.held(2) as found:
                assert content(found) == some_weights(2)
                held.append(engine.loaded(2) > 0)

        threads = [threading.Thread(target=load, args=(engine,)) for engine in idle[:2]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert sorted(held) == [False, True]
        assert busy.fetch(2)
        assert len(fetched) == 1


def test_the_copy_does_not_change_while_an_engine_reads_it(store, tmp_path):
    with closing(PolicyCache(store, tmp_path)) as reader:
        with reader.held(0) as held:
            reader.loaded(0)
            changed = threading.Event()

            def change():
                with closing(PolicyCache(store, tmp_path)) as other:
                    assert other.fetch(1)
                    changed.set()

            thread = threading.Thread(target=change)
            thread.start()
            assert not changed.wait(0.3)
            assert content(held) == some_weights(0)
        thread.join(PATIENCE_S)
        assert changed.is_set()
        with reader.held(1) as held:
            assert content(held) == some_weights(1)


def test_a_run_that_was_created_again_does_not_use_the_former_copy(store, tmp_path):
    """A killed worker of the removed run left a copy of that run's policy 2."""
    left = PolicyCache(store, tmp_path)
    assert left.fetch(2)
    left.loaded(2)
    shutil.rmtree(tmp_path / "run")
    publish(store, 2, tmp_path, seed=9)
    with closing(PolicyCache(store, tmp_path)) as anew, anew.held(2) as held:
        assert content(held) == some_weights(9)
    left.close()


HELD_BY_A_PROCESS = """
import sys, time
from pathlib import Path
from pipeline.policies.cache import PolicyCache
from pipeline.store import open_store

store = open_store(sys.argv[1])
cache = PolicyCache(store, Path(sys.argv[2]))
read_range = type(store).read_range

def slow(self, key, *where):
    if "/000002/" in key:
        print("changing", flush=True)
        time.sleep(600)
    return read_range(self, key, *where)

type(store).read_range = slow
with cache.held(1):
    cache.loaded(1)
print("loaded", flush=True)
cache.fetch(2)
"""


def test_an_engine_killed_while_it_changes_the_copy_leaves_no_version(store, tmp_path):
    """The copy is then empty, and the next engine fetches a version."""
    root = tmp_path / "root"
    arguments = [sys.executable, "-c", HELD_BY_A_PROCESS, store.uri, str(root)]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=dict(os.environ)
    )
    assert process.stdout.readline() == "loaded\n"
    assert process.stdout.readline() == "changing\n"
    [folder] = root.iterdir()
    assert not (folder / "version.json").exists()
    process.send_signal(signal.SIGKILL)
    process.wait(PATIENCE_S)
    with closing(PolicyCache(store, root)) as after:
        with after.held(1) as held:
            assert content(held) == some_weights(1)
        after.loaded(1)
        assert after.fetch(2)
        shutil.copytree(folder, other := folder.with_name(folder.name[:-4] + "ffff"))
        assert other.is_dir()
        with closing(PolicyCache(open_store(str(tmp_path / "second")), root)):
            assert not other.exists()
            assert folder.exists()


def test_copies_of_an_earlier_boot_of_this_host_are_removed(store, tmp_path):
    """Copies of another host on a shared disk stay, as does a copy that an engine uses."""
    root = tmp_path / "root"
    with closing(PolicyCache(store, root)) as cache:
        assert cache.fetch(1)
        [folder] = root.iterdir()
        _, _, user, _, run = folder.name.split("-")
        before = {kind: f"retrace-policies-{user}-{kind}{run[:4]}-{run}" for kind in "abcd"}
        for name in before.values():
            shutil.copytree(folder, root / name)
        (root / before["b"] / "host").write_text("ffffffff")
        (root / before["c"] / "host").unlink()
        with (root / before["d"] / "engines" / "alive").open("w") as engine:
            fcntl.flock(engine, fcntl.LOCK_EX)
            PolicyCache(open_store(str(tmp_path / "second")), root).close()
            left = {path.name for path in root.iterdir()}
            assert left == {folder.name, *(before[kind] for kind in "bcd")}
        PolicyCache(open_store(str(tmp_path / "second")), root).close()
        assert not (root / before["d"]).exists()


def disk_with(monkeypatch, free):
    usage = shutil._ntuple_diskusage(1 << 40, 0, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_a_disk_too_small_for_a_difference_keeps_the_former_version(tmp_path, monkeypatch):
    store = MemoryStore()
    write_chain(store, 1, 3)
    sizes = [read_version(store, version).size for version in (2, 3)]
    with closing(PolicyCache(store, tmp_path)) as cache:
        with cache.held(1):
            cache.loaded(1)
        with monkeypatch.context() as patch:
            disk_with(patch, max(sizes) - 1)
            with pytest.raises(
                StoreError, match=f"/weights: found .* free, expected at least {max(sizes)} bytes"
            ):
                cache.fetch(3)
        read = reads(store, monkeypatch)
        with cache.held(1) as held:
            assert digest_of(held.folder) == held.weights
        assert [key for key in read if key.endswith(".safetensors")] == []
        disk_with(monkeypatch, max(sizes))
        assert cache.fetch(3)


def test_a_folder_that_others_can_access_is_not_used(store, tmp_path):
    cache = PolicyCache(store, tmp_path)
    [folder] = tmp_path.glob("retrace-policies-*")
    cache.close()
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with pytest.raises(StoreError, match="expected a folder that only this user can access"):
        PolicyCache(store, tmp_path)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(StoreError, match="expected a folder that only this user can access"):
        PolicyCache(store, tmp_path)


def wait_until(condition):
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def marked(root):
    """Return the contents of the version files that exist; a fetch may remove a file meanwhile."""
    found = []
    for path in root.glob("retrace-policies-*/version.json"):
        with suppress(FileNotFoundError):
            found.append(path.read_text())
    return found


def test_a_version_is_fetched_ahead_when_the_store_has_it(store, tmp_path):
    """Version 4 is committed later; the engine then loads it without reading the store itself."""
    with closing(PolicyCache(store, tmp_path)) as cache, closing(Prefetch(store, cache)) as ahead:
        assert cache.fetch(3)
        cache.loaded(3)
        ahead.fetch(4)
        time.sleep(0.3)
        assert '"version": 3' in marked(tmp_path)[0]
        publish(store, 4, tmp_path)
        wait_until(lambda: '"version": 4' in "".join(marked(tmp_path)))
        with cache.held(4) as held:
            assert content(held) == some_weights(4)
        assert cache.loaded(4) > 0


def test_a_fetch_in_progress_ends_with_its_engine(store, tmp_path, monkeypatch):
    """If the fetch continued, it would hold the copy, and the last engine could not remove it."""
    monkeypatch.setattr("pipeline.store.download.PIECE", 1)
    read_range, begun = type(store).read_range, threading.Event()

    def slow_read(self, key, *where):
        begun.set()
        time.sleep(0.5)
        return read_range(self, key, *where)

    monkeypatch.setattr(type(store), "read_range", slow_read)
    with (
        closing(PolicyCache(store, tmp_path / "root")) as cache,
        closing(Prefetch(store, cache)) as ahead,
    ):
        ahead.fetch(3)
        assert begun.wait(PATIENCE_S)
    assert list((tmp_path / "root").iterdir()) == []


def test_a_version_that_cannot_be_fetched_ahead_is_refused_when_it_is_needed(
    store, tmp_path, caplog
):
    """The thread continues, and fetches later versions after the damage is repaired."""
    [file] = read_commit(store, keys.policy(1))["files"]
    right = store.read(file["key"])
    store.delete(file["key"])
    store.create(file["key"], some_weights(8))
    with closing(PolicyCache(store, tmp_path)) as cache, closing(Prefetch(store, cache)) as ahead:
        assert cache.fetch(0)
        cache.loaded(0)
        ahead.fetch(1)
        wait_until(lambda: "policy 1 could not be fetched ahead" in caplog.text)
        assert marked(tmp_path) == []
        with pytest.raises(StoreError, match="SHA-256"), cache.held(1):
            pytest.fail("a damaged policy was given")
        store.delete(file["key"])
        store.create(file["key"], right)
        with cache.held(1) as held:
            assert content(held) == some_weights(1)
        cache.loaded(1)
        ahead.fetch(2)
        wait_until(lambda: '"version": 2' in "".join(marked(tmp_path)))


def test_a_folder_that_cannot_be_created_is_a_lasting_error():
    with pytest.raises(RefusedError, match=r"make the copy of policies in /proc/none: .*; free"):
        PolicyCache(MemoryStore(), Path("/proc/none"))
