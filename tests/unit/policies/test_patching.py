"""A folder is patched to exactly the requested version, or refused.

The folder is not marked as valid before it holds the requested version.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeline.policies import coding
from pipeline.policies import fetch as fetch_module
from pipeline.policies.cache import PolicyCache
from pipeline.policies.fetch import fetch_policy, fetch_version
from pipeline.policies.versions import file_name, read_version
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError
from pipeline.store import ObjectMissingError, StoreError, open_store
from tests.exhaustive import sample_or_all
from tests.memory_store import MemoryStore
from tests.paths import ROOT
from tests.policies import write_policy
from tests.weights import digest_of, safetensors

WHOLE = (0, 4)
NEWEST = 6
RNG = np.random.default_rng(0)


def versions() -> list[dict[str, np.ndarray]]:
    """Return versions of three tensors: one is frozen, one changes partly, and one completely."""
    found = [
        {
            "embed": RNG.normal(size=(7, 5)).astype(np.float16),
            "frozen": np.arange(11, dtype=np.int64),
            "norm": np.ones(9, np.float32),
        }
    ]
    for version in range(NEWEST):
        last = {name: array.copy() for name, array in found[-1].items()}
        last["embed"].reshape(-1)[version::3] += np.float16(0.5)
        if version != 2:
            last["norm"] = RNG.normal(size=9).astype(np.float32)
        found.append(last)
    return found


VERSIONS = versions()


@pytest.fixture(name="store")
def seven_versions() -> MemoryStore:
    """Return a store with versions 0 to 6; 0 and 4 are whole, the others are differences."""
    store = MemoryStore()
    for version, arrays in enumerate(VERSIONS):
        before = None if version in WHOLE else VERSIONS[version - 1]
        write_policy(store, version, arrays, before)
    return store


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def reads(store):
    """Return a list to which every later read of a data file adds its key."""
    found, read_range = [], store.read_range

    def noted(key, *where):
        found.append(key)
        return read_range(key, *where)

    store.read_range = noted
    return found


def files_of(version):
    arrays = VERSIONS[version]
    names = [sorted(arrays)[rank::2] for rank in range(2)]
    return {"config.json": b"{}"} | {
        f"model-{rank + 1:05d}-of-00002.safetensors": safetensors({n: arrays[n] for n in names})
        for rank, names in enumerate(names)
    }


@pytest.mark.parametrize("version", range(NEWEST + 1))
def test_every_version_is_fetched_as_if_it_were_whole(store, tmp_path, version):
    digest = fetch_policy(store, version, tmp_path)
    assert content(tmp_path) == files_of(version)
    assert digest == digest_of(tmp_path) == read_version(store, version).weights_sha256


@pytest.mark.parametrize("version", range(1, NEWEST + 1))
@pytest.mark.parametrize("from_version", range(NEWEST))
def test_a_folder_is_patched_from_any_version_to_any_newer_one(
    store, tmp_path, from_version, version
):
    """All differences after the old version are applied."""
    if from_version >= version:
        return
    folder = tmp_path / "weights"
    before = fetch_version(store, from_version, folder)
    read = reads(store)
    held = fetch_version(store, version, folder, before)
    assert content(folder) == files_of(version)
    assert (held.version, held.weights) == (version, digest_of(folder))
    whole = any("/model-" in key for key in read)
    assert whole == (from_version < 4 <= version)


def spoil(store, version, part=""):
    """Change a byte in the middle of a version's files."""
    for file in read_version(store, version).files:
        if part in file.key:
            data = bytearray(store.objects[file.key])
            data[len(data) // 2] ^= 1
            store.objects[file.key] = bytes(data)


def test_a_damaged_difference_is_named_and_leaves_the_folder_unchanged(store, tmp_path):
    """The difference is not applied. The next whole version and later versions do not need it."""
    before = fetch_version(store, 1, tmp_path / "weights")
    spoil(store, 2)
    begun = []
    for version in (2, 3):
        with pytest.raises(CorruptObjectError, match=r"difference-0000\d-of-00002.*SHA-256"):
            fetch_version(store, version, tmp_path / "other", None)
    store.delete(keys.policy(0))  # so the chain through the whole version is broken too
    with pytest.raises(ObjectMissingError, match=r"policies/000000/policy.json is missing"):
        fetch_version(store, 2, tmp_path / "weights", before, lambda: begun.append(1))
    assert not begun
    assert content(tmp_path / "weights") == files_of(1)
    fetch_version(store, 5, tmp_path / "weights", before)
    assert content(tmp_path / "weights") == files_of(5)


def test_a_damaged_commit_of_a_skipped_version_is_not_needed(store, tmp_path, caplog):
    """Version 4 is whole, so the chain of version 5 does not contain the damaged version 2."""
    before = fetch_version(store, 1, tmp_path / "weights")
    store.objects[keys.policy(2)] = store.objects[keys.policy(2)][:-20]
    fetch_version(store, 5, tmp_path / "weights", before)
    assert content(tmp_path / "weights") == files_of(5)
    assert "policy 5: fetching its full chain after an error: policies/000002" in caplog.text


def test_a_difference_from_other_weights_is_not_fetched_for_a_folder(store, tmp_path):
    """The folder holds version 1 of a removed run with the same name."""
    former = MemoryStore()
    for version in (0, 1):
        write_policy(former, version, VERSIONS[version + 3])
    before = fetch_version(former, 1, tmp_path / "weights")
    read = reads(store)
    fetch_version(store, 2, tmp_path / "weights", before)
    assert content(tmp_path / "weights") == files_of(2)
    assert len(read) == len(set(read))


def test_a_pruned_chain_is_not_needed_if_the_folder_holds_its_last_version(store, tmp_path):
    """For a reader without that folder, an error names the missing commit."""
    before = fetch_version(store, 2, tmp_path / "weights")
    for version in (0, 1, 2):
        store.delete(keys.policy(version))
    fetch_version(store, 3, tmp_path / "weights", before)
    assert content(tmp_path / "weights") == files_of(3)
    with pytest.raises(ObjectMissingError, match=r"policies/000002/policy.json is missing"):
        fetch_policy(store, 3, tmp_path / "anew")


def test_a_copy_that_was_damaged_on_this_machine_is_fetched_again(store, tmp_path, caplog):
    """The digest of the patched tensor detects the damage, and a full fetch repairs it."""
    before = fetch_version(store, 1, tmp_path / "weights")
    path = tmp_path / "weights" / "model-00001-of-00002.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    fetch_version(store, 2, tmp_path / "weights", before)
    assert content(tmp_path / "weights") == files_of(2)
    assert "norm has SHA-256" in caplog.text or "embed has SHA-256" in caplog.text


def test_a_patched_tensor_without_the_digest_in_its_share_is_refused(store, tmp_path, monkeypatch):
    """A full fetch gives the same tensor, so the version is refused and no file is left."""
    monkeypatch.setattr(fetch_module, "patch", lambda targets, coded: None)
    with pytest.raises(
        CorruptObjectError, match=r"policies/000001/policy.json .* after patching, expected"
    ):
        fetch_policy(store, 1, tmp_path / "weights")
    assert list((tmp_path / "weights").iterdir()) == []


@settings(max_examples=sample_or_all(60, 1200), deadline=None)
@given(st.data())
def test_damage_that_the_digests_of_files_do_not_show_is_never_loaded(data):
    """Bytes of a difference are changed, inserted or removed, as if its writer had written them."""
    store = MemoryStore()
    for version in (0, 1):
        write_policy(store, version, VERSIONS[version], VERSIONS[0] if version else None)
    [file, *_] = read_version(store, 1).files
    damaged = bytearray(store.objects[file.key])
    for _ in range(data.draw(st.integers(1, 3))):
        # Half of the edits are in the coded tensors, which follow the header.
        begin = data.draw(st.sampled_from([0, 8 + int.from_bytes(damaged[:8], "little")]))
        at = data.draw(st.integers(min(begin, len(damaged) - 1), len(damaged) - 1))
        removed = data.draw(st.integers(0, 2))
        size = data.draw(st.sampled_from([removed, 0, 1, 2]))
        damaged[at : at + removed] = data.draw(st.binary(min_size=size, max_size=size))
        assume(damaged)

    def fetch(store, files, folder):
        for one in files:
            found = damaged if one == file else store.objects[one.key]
            (folder / file_name(one)).write_bytes(found)

    with tempfile.TemporaryDirectory() as own, pytest.MonkeyPatch.context() as patched:
        patched.setattr(fetch_module, "fetch_files", fetch)
        folder = Path(own)
        try:
            fetch_policy(store, 1, folder)
        except CorruptObjectError:
            assert list(folder.iterdir()) == []
        else:
            assert content(folder) == files_of(1)


def test_a_difference_file_without_an_entry_that_its_share_lists_is_refused(
    store, tmp_path, monkeypatch
):
    """The tensor would keep its former bytes, and no digest would show this."""
    real = fetch_module.difference_tensors

    def without(paths):
        return {path: {n: of[n] for n in of if n != "embed"} for path, of in real(paths).items()}

    monkeypatch.setattr(fetch_module, "difference_tensors", without)
    with pytest.raises(CorruptObjectError, match="embed is in only one of the file and the"):
        fetch_policy(store, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_changed_tensor_that_is_listed_as_unchanged_is_refused(tmp_path):
    """The difference file lacks the tensor too; only the digest in the base's share differs."""
    store = MemoryStore()
    write_policy(store, 0, VERSIONS[0])
    write_policy(store, 1, VERSIONS[1], VERSIONS[0] | {"embed": VERSIONS[1]["embed"]})
    with pytest.raises(CorruptObjectError, match="tensor embed is listed as unchanged"):
        fetch_policy(store, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


class DyingStore(MemoryStore):
    """A store whose reads of matching keys fail, as they would without a network."""

    gone = ""

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        if self.gone and self.gone in key:
            raise StoreError(f"read {key}: the network is gone")
        return super().read_range(key, offset, length)


def test_a_network_failure_does_not_cause_a_full_fetch(store, tmp_path):
    """The copy still holds the previous version, and is patched from that version later."""
    store = DyingStore(store.objects)
    cache = PolicyCache(store, tmp_path)
    [folder] = tmp_path.glob("retrace-policies-*")
    assert cache.fetch(1)
    cache.loaded(1)
    store.gone = "policies/000002/"
    with pytest.raises(StoreError, match="network is gone"):
        cache.fetch(2)
    store.gone = ".safetensors"  # the copy needs no file
    with cache.held(1) as held:
        assert content(held.folder) == files_of(1)
    store.gone = "model-"  # whole versions
    assert cache.fetch(2)
    with cache.held(2) as held:
        assert content(held.folder) == files_of(2)
        assert set(held.tensors) == set(VERSIONS[0])
    cache.close()
    assert not folder.exists()


@pytest.mark.parametrize("step", ["begin", "patch", "check"])
def test_a_process_killed_while_patching_leaves_no_version(store, tmp_path, monkeypatch, step):
    """The process ends between the first changed byte and the last digest."""
    first = PolicyCache(store, tmp_path)
    assert first.fetch(1)
    first.loaded(1)
    killed = threading.Event()

    def die(*of):
        killed.set()
        raise SystemExit(9)

    name = {"begin": "begin", "patch": "patch", "check": "check_digests"}[step]
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", lambda *of, **how: None)  # kill -9 removes nothing
        if step == "begin":
            whole = fetch_module.patch
            patched.setattr(fetch_module, "patch", lambda t, c: (die(), whole(t, c)))
        else:
            real = getattr(fetch_module, name)
            patched.setattr(fetch_module, name, lambda *of: (real(*of), die()))
        with pytest.raises(SystemExit):
            first.fetch(2)
    [folder] = tmp_path.glob("retrace-policies-*")
    assert killed.is_set()
    assert not (folder / "version.json").exists()
    assert (folder / "weights").exists()
    second = PolicyCache(store, tmp_path)
    with second.held(2) as held:
        assert content(held.folder) == files_of(2)
    second.close()
    first.close()


SMALL_BLOCK = 8
KILLED_AFTER_A_BLOCK = f"""
import os, signal, sys, threading
from pathlib import Path
from pipeline.policies import coding
from pipeline.policies.cache import PolicyCache
from pipeline.store import open_store

coding.BLOCK = {SMALL_BLOCK}
apply_block, first = coding._apply_block, threading.Lock()

def die(*of):
    first.acquire()  # the threads of other tensors wait
    apply_block(*of)
    os.kill(os.getpid(), signal.SIGKILL)

cache = PolicyCache(open_store(sys.argv[1]), Path(sys.argv[2]))
with cache.held(0):
    cache.loaded(0)
coding._apply_block = die
cache.fetch(1)
"""


def test_a_process_killed_inside_a_tensor_leaves_no_version(tmp_path, monkeypatch):
    """A kill -9 leaves one changed block of one tensor. The next engine gets the right weights."""
    monkeypatch.setattr(coding, "BLOCK", SMALL_BLOCK)
    store = open_store(str(tmp_path / "run"))
    for version in range(2):
        write_policy(store, version, VERSIONS[version], VERSIONS[0] if version else None)
    root = tmp_path / "root"
    arguments = [sys.executable, "-c", KILLED_AFTER_A_BLOCK, store.uri, str(root)]
    assert subprocess.run(arguments, cwd=ROOT, env=dict(os.environ)).returncode == -signal.SIGKILL
    [folder] = root.iterdir()
    assert not (folder / "version.json").exists()
    name = "model-00001-of-00002.safetensors"
    assert (folder / "weights" / name).read_bytes() not in (files_of(0)[name], files_of(1)[name])
    with closing(PolicyCache(store, root)) as cache, cache.held(1) as held:
        assert content(held.folder) == files_of(1)


@pytest.mark.parametrize("wanted", ["the copy's version", "the next version"])
@pytest.mark.parametrize("damage", ["cut", "not a list of tensors", "removed", "no weights"])
def test_a_copy_without_its_tensors_or_weights_is_fetched_again(
    store, tmp_path, caplog, damage, wanted
):
    with closing(PolicyCache(store, tmp_path)) as cache:
        assert cache.fetch(1)
        cache.loaded(1)
        [folder] = tmp_path.glob("retrace-policies-*")
        tensors = folder / "tensors.json"
        if damage == "no weights":
            shutil.rmtree(folder / "weights")
        elif damage == "removed":
            tensors.unlink()
        else:
            tensors.write_bytes(tensors.read_bytes()[:-20] if damage == "cut" else b"[1]")
        version = 1 if wanted == "the copy's version" else 2
        with cache.held(version) as held:
            assert held.folder == folder / "weights"
            assert content(held.folder) == files_of(version)
            assert set(held.tensors) == set(VERSIONS[0])
    assert f"policy 1: its copy in {folder / 'weights'} is damaged" in caplog.text
