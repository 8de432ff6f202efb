"""The stored form of commits, and the comparison of data files with their entries in a commit."""

import hashlib
import json

import pytest

from pipeline.run.commit import CorruptObjectError, DataFile, fetch_file, to_json
from pipeline.store import ObjectMissingError
from tests.memory_store import MemoryStore


@pytest.mark.parametrize(
    ("size", "sha256", "said"),
    [
        (8, hashlib.sha256(b"content").hexdigest(), "key in memory://test: 7 bytes, .* records 8"),
        (7, "0" * 64, r"key in memory://test: SHA-256 ed7002b439e9ac84\.\.\., .* 0000000000000000"),
    ],
)
def test_a_data_file_that_differs_from_its_entry_is_refused(tmp_path, size, sha256, said):
    store = MemoryStore({"key": b"content"})
    with pytest.raises(CorruptObjectError, match=f"{said}.*; throw it away"):
        fetch_file(store, DataFile("key", size, sha256), tmp_path / "file", "throw it away")
    assert list(tmp_path.iterdir()) == []


def test_a_lost_data_file_is_reported_as_missing(tmp_path):
    with pytest.raises(ObjectMissingError, match="key in memory://test: no such object; restore"):
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
