"""Tests that every object store must pass; the tests of a new backend inherit them.

A module with a subclass must also define a fixture `store`, which returns an empty store.
"""

import hashlib
import multiprocessing
import pickle
import random
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.config.tree import RunConfig
from pipeline.errors import InputError
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import publish_policy, refer_policy, stored_weights
from pipeline.run import keys, owner
from pipeline.run.attempts import claimed
from pipeline.run.commit import (
    CorruptObjectError,
    DataFile,
    commit,
    content_digest,
    file_list,
    files_in,
    find_commit,
    new_write_id,
    put_file,
    read_commit,
    read_data,
)
from pipeline.run.wait import WaitTimeoutError, wait_for_any
from pipeline.store import ObjectExistsError, ObjectMissingError, StoreError, UnreadableError
from pipeline.store.download import downloaded
from pipeline.store.s3_ranges import PIECE
from pipeline.store.s3_upload import PART
from tests.attempts import distant_owner
from tests.data_files import put_data
from tests.patience import PATIENCE_S, eventually
from tests.weights import digest_of, safetensors

names = st.lists(st.sampled_from(["a", "b", "ab", "a.json", "a-b"]), min_size=1, max_size=3)


class StoreConformance:
    """The tests of a store; each backend has a subclass."""

    def test_objects_have_the_written_content(self, store, tmp_path):
        store.create("a/b.json", b"hello")
        path = tmp_path / "local"
        path.write_bytes(b"x" * 3_000_000)
        store.upload_file("a/big", path)
        store.create("empty", b"")
        assert store.read("a/b.json") == b"hello"
        assert store.read("a/big") == path.read_bytes()
        assert store.read("empty") == b""
        assert [store.size(key) for key in ("a/b.json", "a/big", "empty")] == [5, 3_000_000, 0]

    def test_a_range_is_read(self, store):
        store.create("key", b"0123456789")
        assert store.read_range("key", 3, 4) == b"3456"
        assert store.read_range("key", 0, 10) == b"0123456789"
        assert store.read_range("key", 10, 0) == b""
        with pytest.raises(StoreError, match="2 bytes at 8, expected 3"):
            store.read_range("key", 8, 3)

    def test_an_object_of_an_unexpected_size_is_not_read(self, store):
        """`read` takes a maximum size, and `read_ranges` takes the exact size, for any ranges."""
        store.create("key", b"0123456789")
        assert store.read("key", 10) == b"0123456789"
        assert store.read_ranges("key", [(0, 4), (8, 2)], 10) == [b"0123", b"89"]
        with pytest.raises(UnreadableError, match=r"read key .*10 bytes, expected at most 9"):
            store.read("key", 9)
        many = [(i << 23, 1 << 23) for i in range(100)]  # ranges of many bytes
        for ranges in ([(0, 4)], [], [(0, 1 << 50)], many):
            with pytest.raises(UnreadableError, match=r"read key .*10 bytes, expected 1125899"):
                store.read_ranges("key", ranges, 1 << 50)
        with pytest.raises(ObjectMissingError):
            store.read_ranges("other", [(0, 1 << 50)], 1 << 50)

    def test_a_range_far_beyond_the_end_allocates_no_memory(self, store):
        store.create("key", b"0123456789")
        tracemalloc.start()
        try:
            with pytest.raises(StoreError, match="expected 536870912"):
                store.read_ranges("key", [(4, 1 << 29)])
            assert tracemalloc.get_traced_memory()[1] < 50e6
        finally:
            tracemalloc.stop()

    def test_an_object_is_created_once(self, store):
        """A second creation is refused and changes nothing."""
        store.create("key", b"first")
        with pytest.raises(ObjectExistsError, match="create key"):
            store.create("key", b"second")
        assert store.read("key") == b"first"
        assert [info.key for info in store.list("")] == ["key"]

    def test_missing_objects_are_reported(self, store):
        assert store.size("key") is None
        assert find_commit(store, "key") is None
        for read in (store.read, lambda key: store.read_range(key, 0, 1)):
            with pytest.raises(ObjectMissingError, match=r"read key"):
                read("key")
        store.create("file", b"")
        with pytest.raises(ObjectMissingError):
            store.read("file/below")
        assert store.size("file/below") is None
        assert list(store.list("nowhere/")) == []
        store.delete("key")

    def test_a_deleted_object_can_be_created_again(self, store):
        store.create("a/key", b"1")
        store.delete("a/key")
        assert store.size("a/key") is None
        store.create("a/key", b"2")
        assert store.read("a/key") == b"2"

    @pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/..", "./a", "a/"])
    def test_keys_that_leave_the_store_are_refused(self, store, key):
        for use in (store.read, store.size, store.delete, lambda key: store.create(key, b"")):
            with pytest.raises(StoreError, match="object key"):
                use(key)

    def test_a_folder_is_not_an_object(self, store):
        """An object store has no folders, so a key's parent does not exist."""
        store.create("a/b", b"1")
        assert store.size("a") is None
        with pytest.raises(ObjectMissingError):
            store.read("a")
        with pytest.raises(ObjectMissingError):
            store.read_range("a", 0, 0)

    def test_a_missing_local_file_is_not_a_missing_object(self, store, tmp_path):
        with pytest.raises(StoreError, match=r"^create key.*nothing-there") as error:
            store.upload_file("key", tmp_path / "nothing-there")
        assert not isinstance(error.value, ObjectMissingError | ObjectExistsError)
        assert store.size("key") is None

    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,  # each store has its own test class
        ],
    )
    @given(
        st.sets(names.map("/".join), max_size=8),
        st.sampled_from(["", "a", "a/", "a/b", "ab/a", "b"]),
    )
    def test_a_listing_returns_the_keys_with_the_prefix_in_order(self, store, found, prefix):
        """The keys may have any depth."""
        folder = new_write_id()  # the examples share a store
        found = {key for key in found if not any(other.startswith(key + "/") for other in found)}
        found = {f"{folder}/{key}" for key in found}
        for key in found:
            store.create(key, key.encode())
        prefix = f"{folder}/{prefix}"
        listed = list(store.list(prefix))
        assert [info.key for info in listed] == sorted(k for k in found if k.startswith(prefix))
        assert all(info.size == len(info.key) for info in listed)

    def test_objects_of_any_size_survive_streaming(self, store):
        """The sizes are close to multiples of the size of an upload's part."""
        for size in (0, 1, PART - 1, PART, PART + 1, 3 * PART + 5):
            data = random.Random(size).randbytes(size)
            with store.upload(f"key-{size}") as upload:
                for start in range(0, size, 3_000_001):
                    piece = memoryview(data)[start : start + 3_000_001]
                    assert upload.write(piece) == len(piece)
                assert store.size(f"key-{size}") is None
                upload.finish()
            assert store.size(f"key-{size}") == size
            assert store.read(f"key-{size}") == data
        assert list(store.debris("")) == []

    @pytest.mark.parametrize("size", [0, PART, 3 * PART + 1])
    def test_a_local_file_of_any_size_is_uploaded(self, store, tmp_path, size):
        path = tmp_path / "local"
        path.write_bytes(random.Random(0).randbytes(size))
        store.upload_file("key", path)
        assert store.read("key") == path.read_bytes()
        assert list(store.debris("")) == []

    @pytest.mark.parametrize("size", [10, 2 * PART + 10])
    def test_an_unfinished_upload_leaves_nothing(self, store, size):
        def fail() -> None:
            with store.upload("key") as upload:
                upload.write(b"x" * size)
                raise KeyError("in mid-upload")

        with pytest.raises(KeyError, match="in mid-upload"):
            fail()
        with store.upload("key") as upload:
            upload.write(b"x" * size)
        assert store.size("key") is None
        assert list(store.list("")) == []
        assert list(store.debris("")) == []

    @settings(
        max_examples=40,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
        ],
    )
    @given(
        st.lists(st.tuples(st.integers(0, 200_000), st.integers(0, 40_000)), max_size=12),
        st.booleans(),
    )
    def test_several_ranges_are_read_in_order(self, store, ranges, whole):
        """Each range is returned in the given order, even if ranges overlap or are empty."""
        data = random.Random(1).randbytes(240_000)
        if store.size("key") is None:
            store.create("key", data)
        ranges = [*ranges, (0, len(data))] if whole else ranges
        found = store.read_ranges("key", ranges)
        assert found == [data[offset : offset + length] for offset, length in ranges]

    def test_large_ranges_are_read(self, store):
        data = random.Random(2).randbytes(5 * PIECE + 3)
        store.create("key", data)
        ranges = [(7, 4 * PIECE), (5 * PIECE, 3), (0, len(data)), (PIECE - 1, 2)]
        found = store.read_ranges("key", ranges)
        assert found == [data[offset : offset + length] for offset, length in ranges]

    def test_ranges_beyond_the_end_are_refused(self, store):
        store.create("key", b"0123456789")
        with pytest.raises(StoreError, match=r"read key .*2 bytes at 8, expected 3"):
            store.read_ranges("key", [(0, 4), (8, 3)])
        with pytest.raises(StoreError, match=r"read key .*0 bytes at 5000000, expected 1"):
            store.read_ranges("key", [(0, 4), (5_000_000, 1)])
        with pytest.raises(ObjectMissingError, match="read other"):
            store.read_ranges("other", [(0, 1), (5_000_000, 1)])

    def test_probing_leaves_nothing(self, store):
        store.probe()
        store.create("key", b"1")
        store.probe()
        assert [info.key for info in store.list("")] == ["key"]
        assert list(store.debris("")) == []

    def test_a_pickled_store_has_the_same_objects(self, store):
        """A spawned process, such as a worker of torch's DataLoader, receives a pickled store."""
        store.create("key", b"1")
        other = pickle.loads(pickle.dumps(store))
        assert (other.uri, other.read("key")) == (store.uri, b"1")

    def test_a_forked_process_can_use_the_store_of_its_parent(self, store, tmp_path):
        """Threads do not survive a fork. Both processes read in threads and create objects."""
        data = random.Random(0).randbytes(3 * PIECE)
        store.create("large", data)

        def use(name: str) -> None:
            assert store.read_ranges("large", [(0, len(data))]) == [data]
            with downloaded(store, "large", len(data), tmp_path / name) as found:
                assert found == hashlib.sha256(data).hexdigest()
            with store.upload(name) as upload:
                upload.write(data)
                upload.finish()

        use("parent")
        child = multiprocessing.get_context("fork").Process(target=use, args=("child",))
        child.start()
        child.join(PATIENCE_S)
        code = child.exitcode  # None if the process hangs
        child.kill()
        child.join()
        assert code == 0
        assert (tmp_path / "child").read_bytes() == data
        assert store.size("child") == len(data)
        use("parent again")

    def test_one_of_many_creators_wins(self, store):
        """Of eight threads that create one object, one succeeds, and its content is stored."""

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

    def test_an_unfinished_upload_is_debris_and_can_be_discarded(self, store):
        """Complete objects are never listed as debris or discarded."""
        store.create("a/key", b"1")
        store.create("b/key", b"2")
        half = store.upload("a/other")
        half.write(b"x" * 20_000_000)
        assert [info.key for info in store.list("")] == ["a/key", "b/key"]
        assert list(store.debris("b/")) == []
        [found] = eventually(
            lambda: list(store.debris("a/")) or None, lambda: "the upload's first request"
        )
        # The size may have grown since then, because parts of the upload are still in transit.
        assert [(i.key, i.upload) for i in store.debris("")] == [(found.key, found.upload)]
        assert time.time() - found.modified_s < 600
        store.discard(found)
        store.discard(found)
        assert list(store.debris("")) == []
        with pytest.raises(StoreError, match="create a/other"):
            half.finish()
        [info] = store.list("a/")
        with pytest.raises(StoreError, match="an object, not debris"):
            store.discard(info)

    # Commits

    def test_the_first_commit_wins(self, store):
        ours = commit(store, "c.json", {"who": 1}, "aaaaaaaa")
        theirs = commit(store, "c.json", {"who": 2}, "bbbbbbbb")
        assert (ours.ours, theirs.ours) == (True, False)
        body = {"who": 1, "attempt": "aaaaaaaa"}
        assert ours.body == {**body, "content_sha256": content_digest(body)}
        assert theirs.body == ours.body == read_commit(store, "c.json")

    def test_a_writer_recognises_its_own_commit(self, store):
        """If the response to a create was lost, the retry finds the object and accepts it."""
        commit(store, "c.json", {"who": 1}, "aaaaaaaa")
        again = commit(store, "c.json", {"who": 1}, "aaaaaaaa")
        assert again.ours

    def test_one_of_many_committers_wins(self, store):
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda i: commit(store, "c", {"i": i}, new_write_id()), range(8)))
        assert sum(c.ours for c in made) == 1
        assert len({c.body["i"] for c in made}) == 1

    @pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"null"])
    def test_an_object_that_is_not_a_commit_is_refused(self, store, content):
        store.create("c.json", content)
        with pytest.raises(CorruptObjectError, match=r"c\.json"):
            read_commit(store, "c.json")

    def test_a_commit_with_nan_is_refused(self, store):
        """Only Python's JSON readers accept NaN, so nothing is created."""
        with pytest.raises(ValueError, match="JSON compliant"):
            commit(store, "c.json", {"loss": float("nan")}, new_write_id())
        assert store.size("c.json") is None

    def test_data_files_are_checked(self, store, tmp_path):
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

    def test_waiting_ends_when_an_object_appears(self, store):
        """If several objects exist, the first key of the list is returned."""
        polls = []

        def appear() -> None:
            polls.append(1)
            if len(polls) == 3:
                store.create("second", b"")
                store.create("third", b"")

        assert wait_for_any(store, ["first", "second", "third"], 60, "a test", appear) == "second"
        assert len(polls) == 3

    def test_the_error_of_a_wait_names_the_objects_and_their_maker(self, store):
        with pytest.raises(WaitTimeoutError, match=r"for a\.json or b\.json in .*rollout worker 3"):
            wait_for_any(store, ["a.json", "b.json"], 0, "rollout worker 3")

    def test_an_error_of_the_caller_ends_a_wait(self, store):
        def died() -> None:
            raise RuntimeError("worker 3 died")

        with pytest.raises(RuntimeError, match="worker 3 died"):
            wait_for_any(store, ["a.json"], 60, "worker 3", died)

    # Policies

    def test_policies_are_published_referred_to_and_fetched(self, store, tmp_path):
        """The weights digest covers the names and content of the weights."""
        folder = tmp_path / "policy"
        folder.mkdir()
        arrays = {"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 1), np.float16)}
        (folder / "model-1.safetensors").write_bytes(safetensors({"a": arrays["a"]}))
        (folder / "model-2.safetensors").write_bytes(safetensors({"b": arrays["b"]}))
        (folder / "config.json").write_bytes(b"{}")
        first = publish_policy(store, 3, folder)
        assert fetch_policy(store, 3, tmp_path / "fetched") == first.body["weights_sha256"]
        assert {p.name: p.read_bytes() for p in (tmp_path / "fetched").iterdir()} == {
            p.name: p.read_bytes() for p in folder.iterdir()
        }
        files = files_in(first.body)
        digest = first.body["weights_sha256"]
        assert digest == digest_of(folder)
        assert digest == stored_weights(store, 3, files)
        assert refer_policy(store, 0, files, digest).body["weights_sha256"] == digest

        (folder / "config.json").write_bytes(b"other")
        assert publish_policy(store, 4, folder).body["weights_sha256"] == digest
        (folder / "model-1.safetensors").write_bytes(safetensors({"a": arrays["a"] + 1}))
        second = publish_policy(store, 3, folder)
        assert not second.ours
        assert second.body["weights_sha256"] == digest
        assert publish_policy(store, 5, folder).body["weights_sha256"] != digest

        store.delete(files[1].key)
        store.create(files[1].key, b"?")
        with pytest.raises(CorruptObjectError, match=r"model-1\.safetensors"):
            fetch_policy(store, 3, tmp_path / "again")

    def test_one_of_many_starts_owns_a_run(self, store, monkeypatch):
        """The others see its signs of life, of which only the newest is kept."""
        monkeypatch.setattr(owner, "SIGN_S", 0.05)
        monkeypatch.setattr(owner, "_LOOK_EVERY_S", 0.1)
        config = RunConfig.model_validate(
            {
                "data": {"train_files": "t.parquet"},
                "actor_rollout_ref": {"model": {"path": "m"}},
                "trainer": {"experiment_name": "x", "total_training_steps": 7},
            }
        )

        def start(_: int) -> str | None:
            try:
                with claimed(store, config, distant_owner()) as claim:
                    barrier.wait(PATIENCE_S)
                    return str(claim.attempt.number)
            except InputError:
                barrier.wait(PATIENCE_S)
                return None

        barrier = threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            assert sorted(pool.map(start, range(4)), key=str) == ["0", None, None, None]
        assert [info.key for info in store.list("signs/")] == []
        assert [info.key for info in store.list(keys.attempts())] == [keys.attempt(0)]
