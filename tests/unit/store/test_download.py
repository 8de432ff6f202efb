"""Downloads need bounded memory, and the file is either complete and correct, or absent."""

import hashlib
import tracemalloc

import pytest

from pipeline.inputs import fetch
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import refer_policy
from pipeline.run import keys
from pipeline.run.commit import DataFile, fetch_file
from pipeline.store import ObjectMissingError, StoreError, download, open_store
from pipeline.store.download import downloaded
from tests.data_files import put_data
from tests.memory_store import MemoryStore

MIB = 1 << 20


class FailingStore(MemoryStore):
    """A store that fails at the second piece."""

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        if offset:
            raise StoreError("read key: the network is gone")
        return super().read_range(key, offset, length)


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(download, "PIECE", 4)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("size", [0, 1, 4, 9])
def test_the_block_receives_the_digest_and_the_file_exists_afterwards(tmp_path, small_pieces, size):
    data = bytes(range(size))
    store = MemoryStore({"key": data})
    with downloaded(store, "key", size, tmp_path / "file") as found:
        assert found == hashlib.sha256(data).hexdigest()
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_bytes() == data
    assert names(tmp_path) == ["file"]


def test_a_block_that_refuses_the_download_leaves_the_old_file(tmp_path, small_pieces):
    (tmp_path / "file").write_bytes(b"before")
    with (
        pytest.raises(ZeroDivisionError),
        downloaded(MemoryStore({"key": b"0123456789"}), "key", 10, tmp_path / "file"),
    ):
        raise ZeroDivisionError
    assert (tmp_path / "file").read_bytes() == b"before"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("store", "size", "error"),
    [
        (MemoryStore(), 10, ObjectMissingError),
        (MemoryStore({"key": b"01234"}), 10, StoreError),
        (FailingStore({"key": b"0123456789"}), 10, StoreError),
    ],
    ids=["missing", "short", "network"],
)
def test_a_download_that_fails_leaves_nothing(tmp_path, small_pieces, store, size, error):
    with (
        pytest.raises(error, match="read key"),
        downloaded(store, "key", size, tmp_path / "file"),
    ):
        pytest.fail("the block must not run")
    assert names(tmp_path) == []


def test_an_error_of_the_disk_raises_a_store_error(tmp_path):
    with (
        pytest.raises(StoreError, match=r"download key from memory://test to .*nowhere"),
        downloaded(MemoryStore({"key": b"1"}), "key", 1, tmp_path / "nowhere" / "file"),
    ):
        pytest.fail("the block must not run")


@pytest.fixture
def large(tmp_path):
    """A store with a policy of 64 MiB in one file; also the file's key and its content."""
    store = open_store(str(tmp_path / "store"))
    data = bytes(range(256)) * (64 * MIB // 256)
    key = keys.policy_file(1, "00000000", "model.safetensors")
    refer_policy(store, 1, [put_data(store, key, data)], "0" * 64)
    return store, key, data


@pytest.mark.parametrize("how", ["policy", "input", "data file"])
def test_memory_is_bounded(how, large, tmp_path, monkeypatch):
    """Downloading a file of 64 pieces takes the memory of only a few pieces."""
    store, key, data = large
    parent, _, name = key.rpartition("/")
    folder = tmp_path / "fetched"
    monkeypatch.setattr(download, "PIECE", MIB)
    monkeypatch.setattr(fetch.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fetch, "open_store", lambda place: open_store(f"{store.uri}/{parent}"))
    tracemalloc.start()
    try:
        if how == "policy":
            fetch_policy(store, 1, folder)
            path = folder / name
        elif how == "input":
            path = fetch.fetch_files("model", f"s3://{tmp_path.name}", [name]) / name
        else:
            folder.mkdir()
            path = folder / "file"
            fetch_file(store, DataFile(key, len(data), hashlib.sha256(data).hexdigest()), path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.read_bytes() == data
    assert peak < (download.AHEAD + 4) * MIB
