"""A version is fetched with parallel reads, and is either complete and correct or refused."""

import threading

import pytest

from pipeline.policies.fetch import fetch_files
from pipeline.run.commit import CorruptObjectError
from pipeline.store import download
from tests.data_files import put_data
from tests.memory_store import MemoryStore
from tests.patience import PATIENCE_S


class MeetingStore(MemoryStore):
    """A store whose reads wait until another read is in progress, and fail if none begins."""

    def __init__(self, reads: int) -> None:
        super().__init__()
        self.meeting = threading.Barrier(reads)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        self.meeting.wait(PATIENCE_S)
        return super().read_range(key, offset, length)


@pytest.mark.parametrize("sizes", [[8], [4, 3]], ids=["one file", "two files"])
def test_reads_run_in_parallel(tmp_path, monkeypatch, sizes):
    """The cases are two pieces of one file, and two files with one piece each."""
    monkeypatch.setattr(download, "PIECE", 4)
    store = MeetingStore(2)
    files = [put_data(store, f"a/{n}", bytes([n]) * size) for n, size in enumerate(sizes)]
    fetch_files(store, files, tmp_path)
    assert [(tmp_path / str(n)).read_bytes() for n in range(len(sizes))] == [
        bytes([n]) * size for n, size in enumerate(sizes)
    ]


def test_the_first_damaged_file_is_named_and_only_undamaged_files_remain(tmp_path):
    store = MemoryStore()
    files = [put_data(store, f"a/{n}", b"right") for n in range(12)]
    store.objects["a/7"] = store.objects["a/9"] = b"wrong"
    with pytest.raises(CorruptObjectError, match="a/7 in memory://test: SHA-256"):
        fetch_files(store, files, tmp_path)
    assert {path.read_bytes() for path in tmp_path.iterdir()} == {b"right"}
