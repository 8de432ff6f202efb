"""Readers refuse commits and files from a faulty or hostile writer, and verify names them, although
all digests match.

Readers raise only TraceError or StoreError, and allocate no memory for a size that is only claimed.
The fuzzer (fuzz/) searches for more such files; those that it found are here.
"""

import json
import tracemalloc
from typing import Any

import pyarrow as pa
import pytest

from pipeline.run import keys
from pipeline.run.commit import CONTENT_SHA256, CorruptObjectError, content_digest, read_commit
from pipeline.store import Store, StoreError, open_store
from pipeline.traces import TraceError, read_manifest, read_routes, read_samples
from pipeline.traces.format.schema import MANIFEST
from pipeline.traces.write.files import FileWriter
from pipeline.upkeep.verify import verify
from tests.memory_store import MemoryStore
from tests.samples import make_samples, sealed_r3

SHARD = keys.rollout(0, 0)
MANIFEST_KEY = keys.manifest(0)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    sealed_r3(store, make_samples())
    return store


def sign(store: MemoryStore, key: str, body: dict[str, Any]) -> None:
    """Store a commit with its new digest. For a shard, sign the manifest again with this digest."""
    body = {name: value for name, value in body.items() if name != CONTENT_SHA256}
    body[CONTENT_SHA256] = content_digest(body)
    store.objects[key] = json.dumps(body).encode()
    if key != MANIFEST_KEY:
        manifest = json.loads(store.objects[MANIFEST_KEY])
        for ref in manifest["data"]:
            if ref["commit"] == key:
                ref["commit_sha256"] = body[CONTENT_SHA256]
        sign(store, MANIFEST_KEY, manifest)


def read_all(store: Store) -> None:
    manifest = read_manifest(store, 0)
    read_samples(store, manifest, manifest.ids)
    read_routes(store, manifest, manifest.ids)


def refused(store: Store, key: str) -> str:
    """Check that readers and verify refuse the step and name the object. Return the error."""
    with pytest.raises((TraceError, StoreError)) as error:
        read_all(store)
    name = key.removesuffix(".json")  # the keys of the commit and its files start with it
    assert any(name in f"{problem.key} {problem.text}" for problem in verify(store).problems)
    return str(error.value)


HUGE = 1 << 60
FILES = [
    (["key"], None),
    (["key"], "../outside"),
    (["key"], "a\0b"),
    (["key"], "\ud800"),
    (["size"], -1),
    (["size"], True),
    (["size"], 1 << 70),
    (["size"], "12"),
    (["sha256"], None),
    (["role"], "model"),
    (["role"], []),
    (["leaves"], None),
    (["leaves"], [None]),
    (["leaves"], []),
    (["footer"], []),
    (["footer"], [0, HUGE, "0" * 64]),
    (["footer"], [-8, 8, "0" * 64]),
    (["row_groups"], {}),
    (["row_groups"], None),
    (["row_groups", 0, "rows"], -1),
    (["row_groups", 0, "rows"], HUGE),
    (["row_groups", 0, "chunks"], []),
    (["row_groups", 0, "chunks", 0], [0, HUGE, "0" * 64]),
    (["row_groups", 0, "chunks", 0], ["0", 1, "0" * 64]),
    (["row_groups", 0, "chunks", 0], [4, 8, None]),
]


@pytest.mark.parametrize("commit", [SHARD, MANIFEST_KEY])
@pytest.mark.parametrize(("path", "value"), FILES)
def test_malformed_descriptions_of_files_are_refused(store, commit, path, value):
    body = json.loads(store.objects[commit])
    for number in range(len(body["files"])):
        inner = body["files"][number]
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
    sign(store, commit, body)
    refused(store, commit)


@pytest.mark.parametrize("size", [HUGE, 1 << 40])
def test_a_wrong_size_of_a_file_is_refused(store, tmp_path, size):
    """The ranges match the claimed size. Readers do not allocate this much memory, whether the
    store is in memory or in a folder."""
    body = json.loads(store.objects[SHARD])
    for file in body["files"]:
        file["footer"] = [file["footer"][0], size - file["footer"][0], "0" * 64]
        file["size"] = size
    sign(store, SHARD, body)
    files = open_store(str(tmp_path))
    for key, data in store.objects.items():
        files.create(key, data)
    tracemalloc.start()
    try:
        for place in (store, files):
            refused(place, SHARD)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"data": None},
        {"data": [1]},
        {"data": [{"key": None, "sha256": "", "commit": "x", "commit_sha256": ""}]},
        {"data": [{"key": "x", "sha256": "", "commit": 5, "commit_sha256": ""}]},
        {"data": []},
        {"policy_versions": 3},
        {"policy_versions": ["0"]},
        {"step": "0"},
        {"geometry": []},
        {"geometry": {"experts": 16, "topk": 4, "layers": ["1"]}},
        {"geometry": {"experts": 1 << 70, "topk": 4, "layers": [1]}},
        {"provenance": "R3"},
        {"provenance": {"kind": [], "policy_version": 0, "engine": ""}},
        {"format": 1.0},
        {"format": "²"},
        {"files": {}},
    ],
)
def test_malformed_manifests_are_refused(store, changes):
    sign(store, MANIFEST_KEY, {**json.loads(store.objects[MANIFEST_KEY]), **changes})
    refused(store, MANIFEST_KEY)


@pytest.mark.parametrize(
    "text",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"a": NaN}', b'{"a": 1e999}', b"\xff", b"1" * 9_999],
)
def test_texts_other_than_json_are_refused(store, text):
    store.objects[MANIFEST_KEY] = text
    with pytest.raises(CorruptObjectError, match=f"{MANIFEST_KEY}.*not"):
        read_commit(store, MANIFEST_KEY)
    refused(store, MANIFEST_KEY)


def forge_rows(store: MemoryStore, **values: Any) -> None:
    """Change values of the manifest's first row."""
    rows = read_manifest(store, 0).rows.to_pylist()
    rows[0].update(values)
    fields = [field.with_nullable(True) for field in MANIFEST]
    table = pa.Table.from_pylist(rows, pa.schema(fields))
    body = json.loads(store.objects[MANIFEST_KEY])
    key = body["files"][0]["key"]
    del store.objects[key]
    with FileWriter(store, key, "manifest", table.schema) as writer:
        writer.write_table(table)
        sign(store, MANIFEST_KEY, {**body, "files": [writer.finish().to_json()]})


PLACE = {"row": 0, "tokens": 1}


@pytest.mark.parametrize(
    "values",
    [
        {"id": None},
        {"id": "000000/2/1"},
        {"rows_total": -1},
        {"rows_total": 0},
        {"rows_valid": -1},
        {"samples": {"file": None, "row": 0}},
        {"samples": {"file": 99, "row": 0}},
        {"samples": {"file": -1, "row": 0}},
        {"samples": {"file": 0, "row": 0}},
        {"samples": {"file": 1, "row": 1 << 30}},
        {"samples": {"file": 1, "row": -1}},
        {"routes": []},
        {"routes": None},
        {"routes": [None]},
        {"routes": [{"file": 99, "segments": [PLACE]}]},
        {"routes": [{"file": 1, "segments": [PLACE]}]},
        {"routes": [{"file": 0, "segments": None}]},
        {"routes": [{"file": 0, "segments": []}]},
        {"routes": [{"file": 0, "segments": [{"row": -1, "tokens": 1}]}]},
        {"routes": [{"file": 0, "segments": [{"row": 1 << 30, "tokens": 1}]}]},
        {"routes": [{"file": 0, "segments": [{"row": 0, "tokens": -1}]}]},
        {"routes": [{"file": 0, "segments": [{"row": 0, "tokens": (1 << 31) - 1}]}]},
        {"routes": [{"file": 0, "segments": [{"row": 0, "tokens": None}]}]},
    ],
)
def test_malformed_rows_of_a_manifest_are_refused(store, values):
    forge_rows(store, **values)
    with pytest.raises((TraceError, StoreError)):
        read_all(store)
    assert verify(store).problems


def test_a_wrong_number_of_rows_is_refused(store):
    """The lengths match each other but not the segments, and no memory is allocated
    for the recorded number of rows."""
    forge_rows(store, prompt_length=1 << 30, response_length=1 << 30, rows_total=(1 << 31) - 1)
    tracemalloc.start()
    try:
        with pytest.raises(
            TraceError, match="prompt_length is 7, but the manifest records 1073741824"
        ):
            read_all(store)
        manifest = read_manifest(store, 0)
        with pytest.raises(TraceError, match="rows of routes, expected 2147483647"):
            read_routes(store, manifest, manifest.ids)
        assert verify(store).problems
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
