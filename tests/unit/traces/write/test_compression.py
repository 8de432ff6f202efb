"""Readers accept every compression that a writer offers, and writers refuse any other value."""

import io
from typing import get_args

import numpy as np
import pyarrow.parquet as pq
import pytest
from pipeline.traces.format.codec import PLANES, coding
from pipeline.traces.read.parts import read_part
from pipeline.traces.write.routes_file import RoutesFile
from pipeline.traces.write.segments import SegmentWriter

from pipeline.config.tree import Rollout
from pipeline.traces import (
    Compression,
    Geometry,
    Routes,
    RouteStream,
    TraceError,
    read_manifest,
    read_routes,
    seal,
    write_shard,
)
from tests.memory_store import MemoryStore
from tests.samples import GEOMETRY, R3, make_samples, random_sets

CODECS = {"zstd": "ZSTD", "lz4": "LZ4", "none": "UNCOMPRESSED"}
CODINGS = {"zstd": b"gaps-uint8", "lz4": b"gaps-uint8", "none": b"ids-uint8"}
"""Without compression, ids are stored. With compression, a file with few rows always stores
gaps."""


@pytest.mark.parametrize("compression", get_args(Compression))
def test_every_reader_accepts_every_compression(store, tmp_path, compression):
    samples = make_samples()
    write_shard(store, 0, 0, "0123abcd", samples, GEOMETRY, R3, compression=compression)
    path = next(tmp_path.rglob("*.routes.parquet"))
    metadata = pq.read_metadata(path)
    assert metadata.metadata[b"retrace.coding"] == CODINGS[compression]
    chunk = metadata.row_group(0).column(4)
    assert (chunk.path_in_schema, chunk.compression) == ("layer_00001", CODECS[compression])
    seal(store, 0, 1, lambda _: sorted(sample.id for sample in samples), 0)
    manifest = read_manifest(store, 0)
    found = read_routes(store, manifest, manifest.ids)
    stream = RouteStream(store, manifest, GEOMETRY.layers)
    for sample in samples:
        known = sample.routes.valid_T
        assert np.array_equal(found[sample.id].sets_TLK[known], sample.routes.sets_TLK[known])
        assert np.array_equal(stream[sample.id].sets_TLK, found[sample.id].sets_TLK)


def test_an_unknown_compression_is_refused_before_writing(store):
    with pytest.raises(TraceError, match="compression 'gzip', expected"):
        write_shard(store, 0, 0, "0123abcd", make_samples(), GEOMETRY, R3, compression="gzip")
    assert list(store.list("")) == []


def test_the_setting_accepts_the_same_values_as_the_writer():
    assert Rollout.model_fields["trace_compression"].annotation == Compression


def routes_of(kind, rows, experts):
    """Return sets [rows, 1, 8]: drawn uniformly, popular experts, or mostly rows that repeat."""
    rng = np.random.default_rng(1)
    geometry = Geometry(experts, 8, (0,))
    if kind == "popular":  # expert 0 is the most popular one, expert 1 the next one, and so on
        scores_TE = rng.gumbel(size=(rows, experts)) - np.log1p(np.arange(experts))
        chosen_TK = np.argsort(-scores_TE, axis=1)[:, :8]
        return np.sort(chosen_TK, axis=1).astype(geometry.dtype)[:, np.newaxis]
    sets_TLK = random_sets(rng, rows, geometry)
    if kind == "uniform":
        return sets_TLK
    # Six of a row's eight ids come from one of 40 sets, so more bytes repeat when ids are stored
    # than when gaps are stored.
    known_NK = random_sets(rng, 40, Geometry(experts, 8, (0,)))[:, 0]
    sets_TLK[:, 0, 1:7] = known_NK[rng.integers(0, 40, rows), 1:7]
    wrong_T = (np.diff(sets_TLK[:, 0].astype(int), axis=1) <= 0).any(axis=1)
    sets_TLK[wrong_T, 0] = known_NK[0]
    return sets_TLK


CHOSEN = {"uniform": "gaps-uint8", "popular": "gaps-planes", "repeated": "ids-uint8"}
"""The coding that is chosen for each kind with zstd and 128 experts."""


@pytest.mark.parametrize("experts", [128, 512])
@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("kind", CHOSEN)
def test_the_smallest_coding_is_chosen(kind, compression, experts):
    """The file is no larger than it would be with another coding. A file with few rows always
    stores gaps of segments."""
    geometry = Geometry(experts, 8, (0,))

    def written(rows, forced=None):
        store, sets_TLK = MemoryStore(), routes_of(kind, rows, experts)
        with RoutesFile(store, "routes", geometry, R3, compression=compression) as file:
            if forced is not None:
                file._coding = forced
            segments = SegmentWriter(file)
            segments.add("a", Routes(sets_TLK, np.ones(rows, bool)), 0, rows)
            segments.finish()
            described = file.finish()
        part = read_part(store, described, geometry, (0,), [0])
        assert np.array_equal(part.sets_LNK[0], sets_TLK[:, 0])
        metadata = pq.read_metadata(io.BytesIO(store.read("routes"))).metadata
        return metadata[b"retrace.coding"].decode(), described.data.size

    chosen, size = written(8_000)
    of_segments = [coding(experts, gaps=gaps) for gaps in (True, False)]
    sizes = [written(8_000, forced)[1] for forced in (*of_segments, *PLANES.values())]
    assert size <= 1.01 * min(sizes)
    assert (compression, experts) != ("zstd", 128) or chosen == CHOSEN[kind]
    assert written(4_000)[0] == of_segments[0]
