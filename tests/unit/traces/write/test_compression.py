"""Every compression that a writer offers is read by every reader, and no other is taken."""

from typing import get_args

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline.config.tree import Rollout
from pipeline.traces import (
    Compression,
    RouteStream,
    TraceError,
    read_manifest,
    read_routes,
    seal,
    write_shard,
)
from tests.samples import GEOMETRY, R3, make_samples

CODECS = {"zstd": "ZSTD", "lz4": "LZ4", "none": "UNCOMPRESSED"}
CODINGS = {"zstd": b"gaps-uint8", "lz4": b"gaps-uint8", "none": b"ids-uint8"}
"""Gaps are only for what is compressed."""


@pytest.mark.parametrize("compression", get_args(Compression))
def test_every_reader_takes_it(store, tmp_path, compression):
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


def test_another_is_refused_before_anything_is_stored(store):
    with pytest.raises(TraceError, match="compression 'gzip', expected"):
        write_shard(store, 0, 0, "0123abcd", make_samples(), GEOMETRY, R3, compression="gzip")
    assert list(store.list("")) == []


def test_the_setting_has_the_values_of_the_writer():
    assert Rollout.model_fields["trace_compression"].annotation == Compression
