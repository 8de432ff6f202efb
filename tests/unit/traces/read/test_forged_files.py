"""Files are not trusted even if they match their digests: they may be forged, or come from a faulty
writer or a later version."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.run.commit import (
    CorruptObjectError,
    DataFile,
    content_digest,
    sha256,
    to_json,
)
from pipeline.store import open_store
from pipeline.traces import TraceError, read_manifest, read_routes, read_samples
from pipeline.traces.format.chunks import describe
from pipeline.upkeep.verify import verify
from tests.samples import equal, make_samples, sealed_r3

SAMPLES = make_samples()


def read_all(root: Path) -> None:
    """Read the step and check that every result is correct."""
    store = open_store(str(root))
    manifest = read_manifest(store, 0)
    found = read_samples(store, manifest, [s.id for s in SAMPLES])
    for sample, expected in zip(found, SAMPLES, strict=True):
        assert (sample.tokens_S == expected.tokens_S).all()
        assert (sample.logprobs_G == expected.logprobs_G).all()
        assert sample.reward == expected.reward
    if manifest.geometry is not None:
        routes = read_routes(store, manifest, manifest.ids)
        assert all(equal(routes[s.id], s.routes) for s in SAMPLES)


def objects(root: Path, suffix: str = "") -> list[Path]:
    return sorted(p for p in root.rglob("*") if p.is_file() and p.name.endswith(suffix))


def test_another_files_commit_is_refused(tmp_path):
    """A shard was written again after the seal. All digests of the new files match their commit,
    but the manifest was sealed with a different commit."""
    store = open_store(str(tmp_path / "one"))
    other = open_store(str(tmp_path / "two"))
    sealed_r3(store, SAMPLES)
    sealed_r3(other, make_samples(seed=9))
    key = "steps/000000/rollout/00000.json"
    for info in list(other.list("steps/000000/rollout/00000")):
        store.delete(info.key)
        store.create(info.key, other.read(info.key))
    manifest = read_manifest(store, 0)
    with pytest.raises(CorruptObjectError, match=f"{key}.*the manifest records"):
        read_samples(store, manifest, manifest.ids)


def foreign_file(root: Path, table: pa.Table) -> None:
    """Replace a routes file with a Parquet file that has a matching commit and manifest, as a
    forger or a faulty writer could."""
    path = objects(root, ".routes.parquet")[0]
    pq.write_table(table, path)
    content = path.read_bytes()
    data = DataFile(path.relative_to(root).as_posix(), len(content), sha256(content))
    file = describe(content, data, "routes").to_json()

    def signed(path: Path, body: dict) -> str:
        body.pop("content_sha256")
        digest = content_digest(body)
        path.write_bytes(to_json({**body, "content_sha256": digest}))
        return digest

    header = path.parent / "00000.json"
    body = json.loads(header.read_bytes())
    body["files"] = [file if f["role"] == "routes" else f for f in body["files"]]
    digest = signed(header, body)
    manifest = path.parent.parent / "manifest.json"
    body = json.loads(manifest.read_bytes())
    for ref in body["data"]:
        if ref["key"] == data.key:
            ref["sha256"] = data.sha256
        if ref["commit"].endswith("00000.json"):
            ref["commit_sha256"] = digest
    signed(manifest, body)


def column(name: str, change: Callable[[list], list]) -> Callable[[pa.Table], pa.Table]:
    """Return a change to the values of a column."""

    def changed(table: pa.Table) -> pa.Table:
        field = table.schema.field(name).with_nullable(True)
        values = pa.array(change(table[name].to_pylist()), field.type)
        return table.set_column(table.schema.get_field_index(name), field, values)

    return changed


def metadata(**values: bytes) -> Callable[[pa.Table], pa.Table]:
    """Return a change to the file's metadata."""
    changes = {f"retrace.{key}".encode(): value for key, value in values.items()}
    return lambda table: table.replace_schema_metadata({**table.schema.metadata, **changes})


# Changes to files that match their digests, and the message with which a reader must refuse each.
FORGERIES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "not a trace": (lambda table: table.replace_schema_metadata({}), "not a trace file"),
    "newer major": (metadata(format=b"2.0"), "version 2.0 is newer than 1.1; use a newer retrace"),
    "other role": (metadata(role=b"samples"), "a samples file, expected routes"),
    "other coding": (metadata(coding=b"bitmap"), "unknown coding 'bitmap'"),
    "other geometry": (
        metadata(geometry=b'{"experts": 17, "topk": 4, "layers": [1, 2, 5]}'),
        "as in its commit",
    ),
    "layer gone": (lambda table: table.drop_columns(["layer_00002"]), "no column layer_00002"),
    "layer null": (
        column("layer_00002", lambda sets: [None, *sets[1:]]),
        "column layer_00002 contains null",
    ),
    "short row": (column("layer_00002", lambda sets: [sets[0][:-1], *sets[1:]]), "coded bytes"),
    "id too large": (
        column("layer_00002", lambda sets: [b"\xff" * len(sets[0]), *sets[1:]]),
        "expected 0..15",
    ),
    "other sets": (
        column("layer_00002", lambda sets: [*sets[:-1], bytes(len(sets[-1]))]),
        "its routes have digest",
    ),
    "owners": (column("owner", lambda owners: owners[::-1]), "a segment of"),
    "positions": (
        column("token_start", lambda starts: [start + 1 for start in starts]),
        "positions up to 7 from its group",
    ),
    "tokens": (column("tokens", lambda tokens: [-1, *tokens[1:]]), "a segment of -1 tokens"),
    "validity": (
        column("validity", lambda bitmaps: [b"\xff" * 9 for _ in bitmaps]),
        "bytes of validity",
    ),
    "fewer rows": (lambda table: table.slice(0, len(table) - 1), "row"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_files_that_match_their_digests_are_not_trusted(tmp_path, case):
    """Digests show that a file did not change, but not that it was correct when it was written."""
    sealed_r3(open_store(str(tmp_path)), SAMPLES)
    table = pq.read_table(objects(tmp_path, ".routes.parquet")[0])
    forge, says = FORGERIES[case]
    foreign_file(tmp_path, forge(table))
    with pytest.raises(TraceError, match=re.escape(says)):
        read_all(tmp_path)
    assert any(says in p.text for p in verify(open_store(str(tmp_path))).problems)


@pytest.mark.parametrize("version", [b"1.1", b"1.7"])
def test_unknown_columns_are_ignored(tmp_path, version):
    """A later minor version's columns, keys and number do not affect this version's readers."""
    sealed_r3(open_store(str(tmp_path)), SAMPLES)
    table = pq.read_table(objects(tmp_path, ".routes.parquet")[0])
    table = table.append_column("router_scores", pa.array([[1.0]] * len(table)))
    meta = {**table.schema.metadata, b"retrace.format": version, b"retrace.new": b"?"}
    foreign_file(tmp_path, table.replace_schema_metadata(meta))
    read_all(tmp_path)
    problems = [problem.text for problem in verify(open_store(str(tmp_path))).problems]
    assert len(problems) == (version != b"1.1")
    assert all("its format is 1.7, but its commit has the format 1.1" in text for text in problems)
