"""Reading returns the samples and routes that were written."""

from typing import get_args

import numpy as np
import pyarrow.parquet as pq
import pytest

from pipeline import threads
from pipeline.config.tree import Rollout
from pipeline.run.commit import CorruptObjectError, new_write_id
from pipeline.traces import (
    Compression,
    RouteStream,
    TraceError,
    VersionSpan,
    new_sample,
    read_routes,
    read_sample_file,
    read_samples,
    seal,
    write_samples,
    write_shard,
    write_step,
)
from pipeline.traces.format import parquet
from pipeline.traces.write import files
from tests.memory_store import MemoryStore
from tests.samples import (
    GEOMETRY,
    R3,
    equal,
    make_samples,
    planned_ids,
    same_sample,
    without_routes,
)


def test_an_empty_shard_is_a_shard(store):
    """If there are more shards than prompts, the last shards are empty and are joined like the
    others."""
    samples = make_samples()
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    write_shard(store, 0, 1, new_write_id(), [], GEOMETRY, R3)
    manifest = seal(store, 0, 2, lambda shard: [] if shard else planned_ids(), 0).all()
    assert len(read_routes(store, manifest, manifest.ids)) == 6


def test_validation_samples_are_written_and_read(store):
    """A validation has no manifest."""
    samples = without_routes(make_samples())
    file = write_samples(store, "validations/000003/00000.aaaaaaaa.samples.parquet", samples)
    assert all(map(same_sample, read_sample_file(store, file), samples))


CODECS = {"zstd": "ZSTD", "lz4": "LZ4", "none": "UNCOMPRESSED"}


@pytest.mark.parametrize("compression", get_args(Compression))
def test_every_reader_accepts_every_compression(store, tmp_path, compression):
    samples = make_samples()
    write_shard(store, 0, 0, "0123abcd", samples, GEOMETRY, R3, compression=compression)
    metadata = pq.read_metadata(next(tmp_path.rglob("*.routes.parquet")))
    chunk = metadata.row_group(0).column(4)
    assert (chunk.path_in_schema, chunk.compression) == ("layer_00002", CODECS[compression])
    manifest = seal(store, 0, 1, lambda _: sorted(sample.id for sample in samples), 0).all()
    found = read_routes(store, manifest, manifest.ids)
    stream = RouteStream(store, manifest, GEOMETRY.layers)
    for sample in samples:
        assert equal(found[sample.id], sample.routes)
        assert equal(stream[sample.id], sample.routes)


def test_an_unknown_compression_is_refused_before_writing(store):
    with pytest.raises(TraceError, match="gzip"):
        write_shard(store, 0, 0, "0123abcd", make_samples(), GEOMETRY, R3, compression="gzip")
    assert list(store.list("")) == []
    assert Rollout.model_fields["trace_compression"].annotation == Compression


@pytest.fixture
def small_pieces(monkeypatch, small_row_groups):
    """Lower the limits, so that every file is large enough for several threads."""
    for module in (files, parquet):
        monkeypatch.setattr(module, "_MUCH", 0)
    monkeypatch.setattr(parquet, "_SMALL", 0)


def test_the_number_of_threads_changes_neither_objects_nor_values(monkeypatch, small_pieces):
    """An error names the same file in all cases."""
    samples = make_samples(prompts=12)
    ids = sorted(sample.id for sample in samples)
    written = []
    for cores in (1, 2, 64):
        monkeypatch.setattr(threads, "core_count", lambda cores=cores: cores)
        store = MemoryStore()
        write_shard(store, 0, 0, "0123abcd", samples, GEOMETRY, R3)
        written.append(dict(store.objects))
        assert written[-1] == written[0]
        manifest = seal(store, 0, 1, lambda _: ids, 0).all()
        found = read_routes(store, manifest, ids, [2, 5])
        for s in samples:
            assert np.array_equal(found[s.id].valid_T, s.routes.valid_T)
            valid_T = s.routes.valid_T
            assert np.array_equal(found[s.id].sets_TLK[valid_T], s.routes.sets_TLK[valid_T, 1:])
        (key,) = (key for key in store.objects if key.endswith(".routes.parquet"))
        content = bytearray(store.objects[key])
        for at in range(100, len(content) // 2, 50):
            content[at] ^= 1
        damaged = MemoryStore({**store.objects, key: bytes(content)})
        with pytest.raises(CorruptObjectError, match=key):
            read_routes(damaged, manifest, ids)


def test_a_step_of_samples_without_routes_has_default_values(store):
    manifest = write_step(store, 0, [new_sample(0, "a", 0, [1, 2], [3])], None, None)
    (sample,) = read_samples(store, manifest.all(), ["000000/a/0"])
    assert np.isnan(sample.logprobs_G).all()
    assert sample.loss_mask_G.all()
    assert (sample.reward, sample.seed, sample.version_spans) == (None, -1, (VersionSpan(0, 0, 1),))
