"""The stored form of commits, and the comparison of data files with their entries in a commit."""

import hashlib
import json

import pytest

from pipeline.run.commit import (
    CorruptObjectError,
    DataFile,
    commit,
    fetch_file,
    read_commit,
    to_json,
)
from pipeline.store import ObjectMissingError
from tests.memory_store import MemoryStore


@pytest.mark.parametrize(
    ("size", "sha256", "said"),
    [(8, hashlib.sha256(b"content").hexdigest(), "7 bytes"), (7, "0" * 64, "SHA-256 ed7002b4")],
)
def test_a_data_file_that_differs_from_its_entry_is_refused(tmp_path, size, sha256, said):
    store = MemoryStore({"key": b"content"})
    with pytest.raises(CorruptObjectError, match=f"key in memory://test: {said}.*throw it away"):
        fetch_file(store, DataFile("key", size, sha256), tmp_path / "file", "throw it away")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b'{"n": 1, "content_sha256": "00"}'])
def test_a_damaged_commit_is_refused(data):
    store = MemoryStore()
    commit(store, "right", {"n": 1, "share": 1e-5}, "aa")
    assert read_commit(store, "right")["share"] == 1e-5
    store.objects["key"] = data
    with pytest.raises(CorruptObjectError, match="key in memory://test: "):
        read_commit(store, "key")


def test_a_lost_data_file_is_reported_as_missing(tmp_path):
    with pytest.raises(ObjectMissingError, match="key in memory://test: no such object"):
        fetch_file(MemoryStore(), DataFile("key", 7, "0" * 64), tmp_path / "file")


def test_a_commit_has_a_line_for_each_key_and_each_item():
    """`diff` and a pager can thus show the content. Line breaks do not affect its meaning."""
    files = [{"size": 2, "key": "a", "chunks": [[4, 7, "9f"]]}, {"key": "\u2028"}]
    body = {"step": 0, "files": files, "empty": [], "share": 0.1}
    text = to_json(body)
    assert json.loads(text) == body
    assert text.decode().splitlines() == [
        "{",
        ' "empty": [],',
        ' "files": [',
        '  {"chunks": [[4, 7, "9f"]], "key": "a", "size": 2},',
        '  {"key": "\\u2028"}',
        " ],",
        ' "share": 0.1,',
        ' "step": 0',
        "}",
    ]
    with pytest.raises(ValueError, match="JSON"):
        to_json({"share": float("nan")})
