"""Uncompressed pages are used in place; the rows equal those that a Parquet library reads."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store import StoreError
from pipeline.traces import Geometry, TraceError, read_manifest, read_routes, seal, write_shard
from pipeline.traces.format.chunks import OpenedGroups
from pipeline.traces.format.header import read_header
from pipeline.traces.format.manifest import file_of
from pipeline.traces.read.parts import read_part
from pipeline.traces.write import segments
from pipeline.upkeep.verify import verify
from tests.forging import Forgery
from tests.memory_store import MemoryStore
from tests.samples import GEOMETRY, R3, make_samples

PLAIN = {
    "compression": "none",
    "use_dictionary": False,
    "column_encoding": {
        f"layer_{layer:05d}": "DELTA_LENGTH_BYTE_ARRAY" for layer in GEOMETRY.layers
    },
}
"""Options with which pyarrow writes pages in the form that is used in place."""


def step_of(geometry: Geometry, tokens: int, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """Seal a step without compression, with row groups of this many tokens."""
    monkeypatch.setattr(segments, "ROW_GROUP_TOKENS", tokens)
    store, samples = MemoryStore(), make_samples(known=0.8, geometry=geometry)
    write_shard(store, 0, 0, "0123abcd", samples, geometry, R3, compression="none")
    seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0)
    return store


@pytest.fixture
def taken(monkeypatch) -> list[bool]:
    """Record, for each page that is examined, whether it is used in place."""
    found: list[bool] = []
    page_bytes = OpenedGroups.page_bytes

    def noted(self: OpenedGroups, group: int, column: str) -> memoryview | None:
        page = page_bytes(self, group, column)
        found.append(page is not None)
        return page

    monkeypatch.setattr(OpenedGroups, "page_bytes", noted)
    return found


@pytest.mark.parametrize("experts", [16, 300])
def test_any_segments_of_any_layers_equal_those_that_pyarrow_reads(experts, taken):
    geometry = Geometry(experts, 4, (1, 2, 5))
    with pytest.MonkeyPatch.context() as patch:
        store = step_of(geometry, 10, patch)
    file = file_of(read_header(store, "steps/000000/rollout/00000.json"), "routes")
    assert len(file.row_groups) > 3

    @given(st.sets(st.integers(0, file.rows - 1)), st.sets(st.sampled_from(geometry.layers)))
    def check(rows, layers):
        chosen = (sorted(layers) or [5], sorted(rows))
        found = read_part(store, file, geometry, *chosen)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(OpenedGroups, "page_bytes", lambda *_: None)
            expected = read_part(store, file, geometry, *chosen)
        assert np.array_equal(found.sets_LNK, expected.sets_LNK)
        assert np.array_equal(found.valid_N, expected.valid_N)
        assert found.segments == expected.segments

    check()
    assert taken
    assert all(taken)


def test_compressed_pages_are_not_used_without_a_copy(taken):
    store, samples = MemoryStore(), make_samples()
    write_shard(store, 0, 0, "0123abcd", samples, GEOMETRY, R3)
    seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0)
    manifest = read_manifest(store, 0)
    read_routes(store, manifest, manifest.ids)
    assert not any(taken)


@pytest.mark.parametrize(
    "options",
    [
        PLAIN,
        {"compression": "none"},
        {"compression": "none", "use_dictionary": False},
        {"compression": "snappy"},
        {**PLAIN, "data_page_size": 1, "write_batch_size": 1},
        {**PLAIN, "data_page_version": "2.0"},
    ],
)
def test_pages_of_every_form_are_read(options, monkeypatch):
    forgery = Forgery(step_of(GEOMETRY, 10_000, monkeypatch))
    expected = read_manifest(forgery.sealed(), 0)
    forgery.shards[0].file("routes").options = options
    store = forgery.sealed()
    assert verify(store).problems == []
    manifest = read_manifest(store, 0)
    assert manifest.ids == expected.ids
    read_routes(store, manifest, manifest.ids)  # compares digests


@pytest.mark.parametrize(
    ("column", "change", "says"),
    [
        ("layer_00002", lambda data: data[:-1], "coded bytes, expected"),
        ("layer_00002", lambda data: data + b"\1", "coded bytes, expected"),
        ("layer_00002", lambda data: data[::-1], "expected ascending ids"),
        ("layer_00002", lambda data: b"\1" + data[1:], "digest|ascending"),
        ("layer_00002", lambda data: data[:-1] + b"\x10", "expert id 16: expected 0..15"),
        ("tokens", lambda _: -1, "a segment of -1 tokens"),
        ("tokens", lambda _: 2**31 - 1, "coded bytes, expected"),
        ("tokens", lambda n: n + 1, "coded bytes, expected"),
    ],
)
def test_invalid_content_is_refused(column, change, says, monkeypatch, taken):
    forgery = Forgery(step_of(GEOMETRY, 10_000, monkeypatch))
    forgery.shards[0].file("routes").options = PLAIN
    row = forgery.segments[1]
    row[column] = change(row[column])
    store = forgery.sealed()
    manifest = read_manifest(store, 0)
    with pytest.raises((TraceError, StoreError), match=says):
        read_routes(store, manifest, manifest.ids)
    assert any(taken) or row["tokens"] < 0  # a negative number is refused before any page
    assert verify(store).problems
