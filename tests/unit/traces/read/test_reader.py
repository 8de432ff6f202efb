"""Only the requested data are fetched, and requests for missing data are refused."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.run.commit import new_write_id
from pipeline.traces import (
    Geometry,
    Routes,
    TraceError,
    open_manifest,
    read_routes,
    read_samples,
    seal,
    write_shard,
)
from pipeline.traces.format import parquet
from pipeline.traces.format.parquet import open_file
from tests.memory_store import MemoryStore
from tests.samples import R3, equal, make_samples, random_sets, sealed_r3, without_routes


class Counting(MemoryStore):
    """A store that records which bytes are read."""

    def __init__(self, objects=None) -> None:
        super().__init__(objects)
        self.ranges = []

    def read_ranges(self, key, ranges, size=None):
        self.ranges += [(key, *range_) for range_ in ranges]
        return super().read_ranges(key, ranges, size)


def test_a_slice_fetches_only_its_own_bytes(monkeypatch, small_row_groups):
    """For two layers of a sample, the reader fetches the footer and, in each of the sample's row
    groups, the validity and the two layers. It fetches no other byte."""
    monkeypatch.setattr(parquet, "_SMALL", 0)
    rng = np.random.default_rng(0)
    geometry = Geometry(64, 8, tuple(range(8)))
    samples = [
        replace(s, routes=Routes(random_sets(rng, len(s.tokens_S) - 1, geometry), s.routes.valid_T))
        for s in make_samples(prompts=6, n=2)
    ]
    store = Counting()
    write_shard(store, 0, 0, new_write_id(), samples, geometry, R3)
    manifest = seal(store, 0, 1, lambda _: [s.id for s in samples], 0).all()
    wanted = samples[5]
    store.ranges = []
    found = read_routes(store, manifest, [wanted.id], [3, 4])
    fetched = sorted(store.ranges)
    assert equal(found[wanted.id], Routes(wanted.routes.sets_TLK[:, 3:5], wanted.routes.valid_T))

    (file,) = (file for file in manifest.files if file.role == "routes")
    opened = open_file(store, file)
    (row,) = manifest.select([wanted.id]).to_pylist()
    (segment,) = row["routes"][0]["segments"]
    groups = set(opened.groups_of(range(segment["row"], segment["row"] + segment["tokens"])))
    assert len(groups) < opened.row_groups
    chunks = opened.ranges(["valid", "layer_00003", "layer_00004"], groups)
    footer = (file.size - file.footer_size, file.footer_size)
    assert fetched == sorted((file.key, *range_) for range_ in [footer, *chunks])


def test_unknown_samples_and_layers_are_refused(store):
    manifest = sealed_r3(store, make_samples())
    with pytest.raises(TraceError, match="unknown: 000000/9/0"):
        read_samples(store, manifest, ["000000/9/0"])
    with pytest.raises(TraceError, match=r"no routes for layers \[0, 4\]"):
        read_routes(store, manifest, manifest.ids, [4, 1, 0])
    # True would read layer 1, and a repeated layer has no place in the result.
    for layers in ([], [1, 1], [True], [1.0], [[1]], [-1], [2**70], 1, "1"):
        with pytest.raises(TraceError, match="step 0: layers"):
            read_routes(store, manifest, manifest.ids[:1], layers)


def test_ids_and_layers_may_come_from_any_iterable_and_in_any_order(store):
    """Axis L and the keys of the result have the requested order."""
    samples = make_samples()
    manifest = sealed_r3(store, samples)
    ids = manifest.ids[::-1]
    for layers in ([5, 1], np.array([5, 1], ">i2"), (layer for layer in [5, 1])):
        found = read_routes(store, manifest, iter(ids), layers)
        assert list(found) == ids
        for s in samples:
            assert equal(found[s.id], Routes(s.routes.sets_TLK[:, [2, 0]], s.routes.valid_T))
    assert [sample.id for sample in read_samples(store, manifest, iter(ids))] == ids


@pytest.mark.parametrize("read", [read_samples, read_routes])
def test_samples_and_routes_are_not_read_without_rows(store, read):
    manifest = sealed_r3(store, make_samples())
    for given in (open_manifest(store, 0), None):
        with pytest.raises(TraceError, match=f"{read.__name__}: found a .*, expected a Manifest"):
            read(store, given, manifest.ids)


def test_a_file_with_other_samples_or_rows_than_the_manifest_lists_is_refused(store):
    """The manifest's rows of two samples are exchanged, or one lacks its last position."""
    manifest = sealed_r3(store, make_samples())
    rows = manifest.rows.to_pylist()
    rows[0]["samples"], rows[1]["samples"] = rows[1]["samples"], rows[0]["samples"]
    rows[2]["routes"][0]["segments"][0]["tokens"] -= 1
    wrong = replace(manifest, rows=type(manifest.rows).from_pylist(rows, manifest.rows.schema))
    with pytest.raises(TraceError, match=r"samples\.parquet .*row \d"):
        read_samples(store, wrong, manifest.ids[:1])
    with pytest.raises(TraceError, match=f"sample {manifest.ids[2]}: "):
        read_routes(store, wrong, manifest.ids)
    rows[0]["samples"]["row"] = 10**6
    wrong = replace(manifest, rows=type(manifest.rows).from_pylist(rows, manifest.rows.schema))
    with pytest.raises(TraceError, match=r"samples\.parquet .*row 1000000"):
        read_samples(store, wrong, manifest.ids[:1])


def test_a_step_without_routes_has_none_to_read(store):
    samples = without_routes(make_samples())
    write_shard(store, 0, 0, new_write_id(), samples, None, None)
    manifest = seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0).all()
    assert manifest.geometry is None
    assert manifest.rows["routes"].null_count == manifest.rows["rows_valid"].null_count == 6
    with pytest.raises(TraceError, match="no routes"):
        read_routes(store, manifest, manifest.ids)


def test_samples_share_memory_only_if_most_of_it_is_needed(store):
    """All samples of a row group are views of the same array. A few of them are copied, so that
    they do not keep the others in memory."""
    manifest = sealed_r3(store, make_samples(prompts=6))
    together = read_routes(store, manifest, manifest.ids).values()
    few = read_routes(store, manifest, manifest.ids[:1]).values()
    shared = {id(routes.sets_TLK.base): routes.sets_TLK.base.size for routes in together}
    assert sum(shared.values()) == sum(routes.sets_TLK.size for routes in together)
    assert len(shared) == 2  # shards
    assert [routes.sets_TLK.base.size for routes in few] == [r.sets_TLK.size for r in few]
