"""What every object store must do. A new backend joins the fixture and passes the same tests."""

import hashlib
import multiprocessing
import os
import signal
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.store import (
    ObjectExistsError,
    ObjectMissingError,
    Store,
    StoreError,
    keys,
    open_store,
)
from pipeline.store.commit import (
    CorruptObjectError,
    DataFile,
    commit,
    file_list,
    files_in,
    find_commit,
    new_attempt,
    put_data,
    put_file,
    read_commit,
    read_data,
)
from pipeline.store.policy import fetch_policy, policy_digest, publish_policy, refer_policy
from pipeline.store.wait import WaitTimeoutError, wait_for_any


@pytest.fixture(params=["folder", "uri"])
def store(request, tmp_path) -> Store:
    root = tmp_path / "a store"
    return open_store(str(root) if request.param == "folder" else root.as_uri())


def test_objects_are_what_was_written(store, tmp_path):
    store.create("a/b.json", b"hello")
    path = tmp_path / "local"
    path.write_bytes(b"x" * 3_000_000)
    store.create_from_file("a/big", path)
    store.create("empty", b"")
    assert store.read("a/b.json") == b"hello"
    assert store.read("a/big") == path.read_bytes()
    assert store.read("empty") == b""
    assert [store.size(key) for key in ("a/b.json", "a/big", "empty")] == [5, 3_000_000, 0]


def test_ranges(store):
    store.create("key", b"0123456789")
    assert store.read_range("key", 3, 4) == b"3456"
    assert store.read_range("key", 0, 10) == b"0123456789"
    assert store.read_range("key", 10, 0) == b""
    with pytest.raises(StoreError, match="2 bytes at 8, expected 3"):
        store.read_range("key", 8, 3)


def test_an_object_is_created_once(store, tmp_path):
    """The second creation is refused and changes nothing, whichever way it comes."""
    store.create("key", b"first")
    with pytest.raises(ObjectExistsError, match="create key"):
        store.create("key", b"second")
    path = tmp_path / "local"
    path.write_bytes(b"third")
    with pytest.raises(ObjectExistsError, match="create key"):
        store.create_from_file("key", path)
    assert store.read("key") == b"first"
    assert [info.key for info in store.list("")] == ["key"]


def test_what_is_not_there(store):
    assert store.size("key") is None
    assert find_commit(store, "key") is None
    for read in (store.read, lambda key: store.read_range(key, 0, 1)):
        with pytest.raises(ObjectMissingError, match="read key"):
            read("key")
    store.create("file", b"")
    with pytest.raises(ObjectMissingError):
        store.read("file/below")
    assert store.size("file/below") is None
    assert list(store.list("nowhere/")) == []
    store.delete("key")


def test_deleting(store):
    store.create("a/key", b"1")
    store.delete("a/key")
    assert store.size("a/key") is None
    store.create("a/key", b"2")
    assert store.read("a/key") == b"2"


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/..", "./a", "a/"])
def test_keys_that_leave_the_store_are_refused(store, key):
    for use in (store.read, store.size, store.delete, lambda key: store.create(key, b"")):
        with pytest.raises(StoreError, match="object key"):
            use(key)


def test_a_folder_is_no_object(store):
    """An object store has no folders; the parent of an object is not there."""
    store.create("a/b", b"1")
    assert store.size("a") is None
    with pytest.raises(ObjectMissingError):
        store.read("a")
    with pytest.raises(ObjectMissingError):
        store.read_range("a", 0, 0)


def test_a_missing_local_file_is_not_a_missing_object(store, tmp_path):
    with pytest.raises(StoreError, match="nothing-there") as error:
        store.create_from_file("key", tmp_path / "nothing-there")
    assert not isinstance(error.value, ObjectMissingError | ObjectExistsError)
    assert store.size("key") is None


names = st.lists(st.sampled_from(["a", "b", "ab", "a.json", "a-b"]), min_size=1, max_size=3)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sets(names.map("/".join), max_size=8), st.sampled_from(["", "a", "a/", "a/b", "ab/a", "b"])
)
def test_listing(tmp_path, found, prefix):
    """Exactly the keys that start with the prefix, in order of key, whatever their depth."""
    found = {key for key in found if not any(other.startswith(key + "/") for other in found)}
    store = open_store(str(tmp_path / new_attempt()))
    for key in found:
        store.create(key, key.encode())
    listed = list(store.list(prefix))
    assert [info.key for info in listed] == sorted(k for k in found if k.startswith(prefix))
    assert all(info.size == len(info.key) for info in listed)


def test_one_of_many_creators_wins(store):
    """Eight threads create one object: one succeeds, and what is read is its content."""

    def create(i: int) -> int | None:
        try:
            store.create("key", str(i).encode() * 1000)
        except ObjectExistsError:
            return None
        return i

    with ThreadPoolExecutor(8) as pool:
        winners = [i for i in pool.map(create, range(8)) if i is not None]
    assert len(winners) == 1
    assert store.read("key") == str(winners[0]).encode() * 1000


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
    for uri in ("s3://bucket", "gs://bucket/x", "file://other-host/x"):
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


def test_debris(store, tmp_path):
    """What an upload left that was never finished is found and removed; objects are not touched."""
    store.create("a/key", b"1")
    store.create("b/key", b"2")
    half = store.upload("a/other")
    half.write(b"x" * 100)
    assert [info.key for info in store.list("")] == ["a/key", "b/key"]
    assert list(store.debris("b/")) == []
    [found] = store.debris("a/")
    assert list(store.debris("")) == [found]
    assert time.time() - found.modified_s < 600
    store.discard(found)
    store.discard(found)
    assert list(store.debris("")) == []
    with pytest.raises(StoreError, match="create a/other"):
        half.finish()
    [info] = store.list("a/")
    with pytest.raises(StoreError, match="an object, not debris"):
        store.discard(info)


def test_probing_leaves_nothing(store, tmp_path):
    store.probe()
    assert not (tmp_path / "a store").exists()
    store.create("key", b"1")
    store.probe()
    assert [info.key for info in store.list("")] == ["key"]


# Commits


def test_the_first_commit_wins(store):
    ours = commit(store, "c.json", {"who": 1}, "aaaaaaaa")
    theirs = commit(store, "c.json", {"who": 2}, "bbbbbbbb")
    assert (ours.ours, theirs.ours) == (True, False)
    assert (
        theirs.body
        == ours.body
        == read_commit(store, "c.json")
        == {
            "who": 1,
            "attempt": "aaaaaaaa",
        }
    )


def test_ones_own_commit_is_recognised(store):
    """The answer to a successful create was lost; the retry finds the object there and knows it."""
    commit(store, "c.json", {"who": 1}, "aaaaaaaa")
    again = commit(store, "c.json", {"who": 1}, "aaaaaaaa")
    assert again.ours


def test_one_of_many_committers_wins(store):
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda i: commit(store, "c", {"i": i}, new_attempt()), range(8)))
    assert sum(c.ours for c in made) == 1
    assert len({c.body["i"] for c in made}) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
def test_what_is_not_a_commit_is_refused(store, content):
    store.create("c.json", content)
    with pytest.raises(CorruptObjectError, match=r"c\.json"):
        read_commit(store, "c.json")


def test_nan_is_not_json(store):
    """No reader outside of Python would take it; nothing is created."""
    with pytest.raises(ValueError, match="JSON compliant"):
        commit(store, "c.json", {"loss": float("nan")}, new_attempt())
    assert store.size("c.json") is None


def test_data_files_are_checked(store, tmp_path):
    path = tmp_path / "local"
    path.write_bytes(b"content")
    digest = hashlib.sha256(b"content").hexdigest()
    assert put_data(store, "one", b"content") == DataFile("one", 7, digest)
    assert put_file(store, "two", path) == DataFile("two", 7, digest)
    body = {"files": file_list([DataFile("one", 7, digest)])}
    assert files_in(body) == [DataFile("one", 7, digest)]
    assert read_data(store, DataFile("one", 7, digest)) == b"content"
    for wrong in (DataFile("one", 8, digest), DataFile("one", 7, "0" * 64)):
        with pytest.raises(CorruptObjectError, match=r"one in .*7 bytes with SHA-256"):
            read_data(store, wrong)


# Waiting


def test_waiting_ends_when_an_object_appears(store):
    """The earliest in the list wins, however many are there."""
    polls = []

    def appear() -> None:
        polls.append(1)
        if len(polls) == 3:
            store.create("second", b"")
            store.create("third", b"")

    assert wait_for_any(store, ["first", "second", "third"], 60, "nobody", appear) == "second"
    assert len(polls) == 3


def test_waiting_says_who_should_have_made_what(store):
    with pytest.raises(WaitTimeoutError, match=r"for a\.json or b\.json in .*rollout worker 3"):
        wait_for_any(store, ["a.json", "b.json"], 0, "rollout worker 3")


def test_waiting_gives_up_when_told(store):
    def died() -> None:
        raise RuntimeError("worker 3 died")

    with pytest.raises(RuntimeError, match="worker 3 died"):
        wait_for_any(store, ["a.json"], 60, "worker 3", died)


# Policies


def test_policies(store, tmp_path):
    """Published, referred to and fetched; the digest is of the weights' names and content alone."""
    folder = tmp_path / "policy"
    folder.mkdir()
    for name in ("model-1.safetensors", "model-2.safetensors", "config.json"):
        (folder / name).write_bytes(name.encode())
    first = publish_policy(store, 3, folder)
    fetch_policy(store, 3, tmp_path / "fetched")
    assert {p.name: p.read_bytes() for p in (tmp_path / "fetched").iterdir()} == {
        p.name: p.read_bytes() for p in folder.iterdir()
    }
    files = files_in(first.body)
    assert first.body["sha256"] == policy_digest(files[::-1])
    assert refer_policy(store, 0, files).body["sha256"] == first.body["sha256"]

    (folder / "config.json").write_bytes(b"other")
    assert publish_policy(store, 4, folder).body["sha256"] == first.body["sha256"]
    (folder / "model-1.safetensors").write_bytes(b"other")
    second = publish_policy(store, 3, folder)
    assert not second.ours
    assert second.body["sha256"] == first.body["sha256"]
    assert publish_policy(store, 5, folder).body["sha256"] != first.body["sha256"]

    (Path(store.uri.removeprefix("file://").replace("%20", " ")) / files[1].key).write_bytes(b"?")
    with pytest.raises(CorruptObjectError, match=r"model-1\.safetensors"):
        fetch_policy(store, 3, tmp_path / "again")


# Names


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
