"""Readers refuse commits and files from a faulty or hostile writer, and verify names them, although
all digests match.

Readers raise only TraceError or StoreError, and allocate no memory for a size that is only claimed.
The fuzzer (fuzz/) searches for more such files; those that it found are here.
"""

import json
import re
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
REF = {"key": "x", "sha256": "", "commit": "x", "commit_sha256": ""}
FILES = [
    (["key"], None, "files: item 0: key: null is not a string"),
    (["key"], "../outside", "files: item 0: key: .* relative parts are not allowed"),
    (["key"], "a\0b", "files: item 0: key: .* only printable characters are allowed"),
    (["key"], "\ud800", "not JSON: .* half of a surrogate pair"),
    (["size"], -1, "files: item 0: size: -1 is not a count"),
    (["size"], True, "files: item 0: size: True is not a count"),
    (["size"], 1 << 70, r"files: item 0: size: \d+ is not a count"),
    (["size"], "12", "files: item 0: size: '12' is not a count"),
    (["sha256"], None, "files: item 0: sha256: null is not a string"),
    (["role"], "model", "a (samples|manifest) file, expected model"),
    (["role"], [], r"files: item 0: role: \[\] is not a string"),
    (["leaves"], None, "files: item 0: leaves: null is not a list"),
    (["leaves"], [None], "files: item 0: leaves: item 0: null is not a string"),
    (["leaves"], [], r"row_groups: item 0: chunks: \d+ items, expected 0: one per leaf column"),
    (["footer"], [], r"footer: \[\], expected an offset, a length and a digest"),
    (["footer"], [0, HUGE, "0" * 64], r"footer: bytes 0..1152921504606846976, expected at most \d"),
    (["footer"], [-8, 8, "0" * 64], "footer: -8 is not a count"),
    (["row_groups"], {}, "row_groups: {} is not a list"),
    (["row_groups"], None, "row_groups: null is not a list"),
    (["row_groups", 0, "rows"], -1, "row_groups: item 0: rows: -1 is not a count"),
    (["row_groups", 0, "rows"], HUGE, r"row groups of \[\d\] rows, expected the numbers in"),
    (["row_groups", 0, "chunks"], [], r"chunks: 0 items, expected \d+: one per leaf column"),
    (["row_groups", 0, "chunks", 0], [0, HUGE, "0" * 64], r"chunks: item 0: bytes 0..1152921504"),
    (["row_groups", 0, "chunks", 0], ["0", 1, "0" * 64], "chunks: item 0: '0' is not a count"),
    (["row_groups", 0, "chunks", 0], [4, 8, None], "chunks: item 0: null is not a string"),
]


@pytest.mark.parametrize("commit", [SHARD, MANIFEST_KEY])
@pytest.mark.parametrize(("path", "value", "says"), FILES)
def test_malformed_descriptions_of_files_are_refused(store, commit, path, value, says):
    body = json.loads(store.objects[commit])
    for number in range(len(body["files"])):
        inner = body["files"][number]
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
    sign(store, commit, body)
    assert re.search(says, refused(store, commit))


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
    ("changes", "says"),
    [
        ({"data": None}, "data: null is not a list"),
        ({"data": [1]}, "data: item 0: 1 is not an object"),
        ({"data": [{**REF, "key": None}]}, "data: item 0: key: null is not a string"),
        ({"data": [{**REF, "commit": 5}]}, "data: item 0: commit: 5 is not a string"),
        ({"data": []}, "a sample refers to file 1, expected no files"),
        ({"policy_versions": 3}, "policy_versions: 3 is not a list"),
        ({"policy_versions": ["0"]}, "policy_versions: item 0: '0' is not a count"),
        ({"step": "0"}, "step: '0' is not a count"),
        ({"geometry": []}, r"geometry: found \[\], expected an object with"),
        ({"geometry": {"experts": 16, "topk": 4, "layers": ["1"]}}, r"geometry: .* layers asc"),
        ({"geometry": {"experts": 1 << 70, "topk": 4, "layers": [1]}}, "geometry: .* <= experts"),
        ({"provenance": "R3"}, "malformed provenance 'R3'"),
        ({"provenance": {"kind": [], "policy_version": 0, "engine": ""}}, r"kind of trace \[\]"),
        ({"format": 1.0}, "format version 1.0, expected two numbers of at most 5 digits"),
        (
            {"format": "1.123456"},
            "format version '1.123456', expected two numbers of at most 5 digits",
        ),
        ({"format": "²"}, "format version '²', expected two numbers of at most 5 digits"),
        ({"files": {}}, "files: {} is not a list"),
        ({"files": [{}]}, "files: item 0: the field 'size' is missing"),
        ({"step": 1}, "the manifest of step 1, expected step 0"),
    ],
)
def test_malformed_manifests_are_refused(store, changes, says):
    sign(store, MANIFEST_KEY, {**json.loads(store.objects[MANIFEST_KEY]), **changes})
    assert re.search(says, refused(store, MANIFEST_KEY))


def test_a_manifest_with_two_files_of_rows_is_refused(store):
    body = json.loads(store.objects[MANIFEST_KEY])
    sign(store, MANIFEST_KEY, {**body, "files": body["files"] * 2})
    assert "2 files of rows, expected one" in refused(store, MANIFEST_KEY)


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


def in_file(file: int, *places: dict[str, int | None]) -> dict[str, Any]:
    """Return the value of `routes` for a sample whose segments are in one file."""
    return {"routes": [{"file": file, "segments": list(places)}]}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"id": None}, "column id contains null, expected none"),
        ({"id": "000000/2/1"}, "duplicated: 000000/2/1"),
        ({"rows_total": -1}, "rows_total is 11, but the manifest records -1"),
        ({"rows_total": 0}, "rows_total is 11, but the manifest records 0"),
        ({"rows_valid": -1}, "11 valid rows, but its manifest records -1"),
        ({"samples": {"file": None, "row": 0}}, "column samples contains null in a list or group"),
        ({"samples": {"file": 99, "row": 0}}, "a sample refers to file 99, expected 0..3"),
        ({"samples": {"file": -1, "row": 0}}, "a sample refers to file -1, expected 0..3"),
        ({"samples": {"file": 0, "row": 0}}, "routes.parquet in .*: no column id, group"),
        ({"samples": {"file": 1, "row": 1 << 30}}, "row 1073741824, expected 0..3"),
        ({"samples": {"file": 1, "row": -1}}, "row -1, expected 0..3"),
        ({"routes": []}, r"sample 000000/0/0: no routes for layers \[1, 2, 5\]"),
        ({"routes": None}, r"sample 000000/0/0: no routes for layers \[1, 2, 5\]"),
        ({"routes": [None]}, "column routes contains null in a list or group"),
        (in_file(99, PLACE), "a sample refers to file 99, expected 0..3"),
        (in_file(1, PLACE), "samples.parquet in .*: no column owner"),
        (
            {"routes": [{"file": 0, "segments": None}]},
            "column routes contains null in a list or group",
        ),
        (in_file(0), "sample 000000/0/0: 0 rows of routes, expected 11"),
        (in_file(0, {"row": -1, "tokens": 1}), "row -1, expected 0..4"),
        (in_file(0, {"row": 1 << 30, "tokens": 1}), "row 1073741824, expected 0..4"),
        (in_file(0, {"row": 0, "tokens": -1}), "-1 tokens from a segment of 7 tokens"),
        (in_file(0, {"row": 0, "tokens": (1 << 31) - 1}), "2147483647 tokens from a segment of 7"),
        (in_file(0, {"row": 0, "tokens": None}), "column routes contains null in a list or group"),
    ],
)
def test_malformed_rows_of_a_manifest_are_refused(store, values, says):
    forge_rows(store, **values)
    with pytest.raises((TraceError, StoreError), match=says):
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
