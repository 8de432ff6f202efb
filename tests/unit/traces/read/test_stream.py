"""Routes that are read ahead equal the result of read_routes, and each byte is fetched only
once."""

import threading
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.store import StoreError, open_store
from pipeline.traces import (
    Routes,
    RouteStream,
    SampleStream,
    TraceError,
    VersionSpan,
    open_manifest,
    read_routes,
    read_samples,
    write_step,
)
from pipeline.traces.read import stream as stream_module
from pipeline.traces.read.joined import used_routes
from pipeline.traces.write import segments as segments_module
from tests.samples import GEOMETRY, R3, equal, make_samples, sealed_r2, sealed_r3


@pytest.fixture
def small(monkeypatch):
    """Use many small row groups, with few row groups per fetch."""
    monkeypatch.setattr(segments_module, "ROW_GROUP_TOKENS", 10)
    monkeypatch.setattr(stream_module, "_AT_ONCE_BYTES", 2_000)


class Noting:
    """A store that records reads, and delays them until `go` is set."""

    def __init__(self, store):
        self._store = store
        self.ranges = []
        self.go = threading.Event()
        self.go.set()

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read_ranges(self, key, ranges, size):
        assert self.go.wait(60)
        self.ranges += [(key, *range_) for range_ in ranges]
        return self._store.read_ranges(key, ranges, size)


@pytest.mark.parametrize("seal", [sealed_r3, sealed_r2])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(data=st.data())
def test_the_stream_equals_a_reader(tmp_path_factory, small, seal, data):
    """Any samples and layers can be read, and looked up in any order. In R2, the layers are in the
    files of several stages."""
    store = open_store(str(tmp_path_factory.mktemp("store")))
    samples = make_samples(prompts=4, n=3, seed=data.draw(st.integers(0, 9)))
    seal(store, samples)
    manifest = used_routes(store, 0)
    ids = data.draw(st.lists(st.sampled_from(manifest.ids), unique=True))
    layers = data.draw(st.lists(st.sampled_from(GEOMETRY.layers), unique=True, min_size=1))
    stream = RouteStream(store, replace(manifest, rows=manifest.select(ids)), sorted(layers))
    expected = read_routes(store, manifest, ids, sorted(layers))
    for id in data.draw(st.permutations(ids)):
        assert equal(stream[id], expected[id])
        assert stream[id].sets_TLK.dtype == expected[id].sets_TLK.dtype
    assert list(stream) == ids
    stream.close()


def test_a_sample_of_one_token_has_no_rows(store):
    """It has no segments, so the stream opens no file for it, alone or with other samples."""
    samples = make_samples(prompts=2, n=1)
    empty = np.empty(0)
    samples[0] = replace(
        samples[0],
        prompt_tokens_P=samples[0].prompt_tokens_P[:1],
        response_tokens_G=empty.astype(np.uint32),
        loss_mask_G=empty.astype(np.bool_),
        logprobs_G=empty.astype(np.float32),
        version_spans=(VersionSpan(0, 0, 0),),
        routes=Routes(samples[0].routes.sets_TLK[:0], samples[0].routes.valid_T[:0]),
    )
    write_step(store, 0, samples, GEOMETRY, R3)
    for share in ([0], [0, 1]):
        manifest = open_manifest(store, 0).select(share)
        with closing(RouteStream(store, manifest, GEOMETRY.layers)) as stream:
            assert [len(stream[id].valid_T) for id in manifest.ids] == (
                manifest.rows["rows_total"].to_pylist()
            )


def test_streamed_samples_equal_those_of_a_reader(store):
    """There are more samples than are read at a time, and they are not in the order of the
    files."""
    sealed_r3(store, make_samples(prompts=14, n=3))
    manifest = open_manifest(store, 0).select(np.random.default_rng(0).permutation(42))
    stream = SampleStream(store, manifest)
    for expected in read_samples(store, manifest, manifest.ids):
        found = stream[expected.id]
        assert (found.tokens_S == expected.tokens_S).all()
        assert (found.group, found.reward, found.seed) == (
            expected.group,
            expected.reward,
            expected.seed,
        )
    assert list(stream) == manifest.ids
    stream.close()


def test_every_range_is_fetched_once_and_counted(store, small):
    sealed_r3(store, make_samples(prompts=6, n=3))
    manifest = open_manifest(store, 0).all()
    noting = Noting(store)
    stream = RouteStream(noting, manifest, [1, 2])
    assert len(dict(stream)) == 18
    stream.close()
    assert len(set(noting.ranges)) == len(noting.ranges) > 20
    assert stream.fetched_bytes == sum(length for _, _, length in noting.ranges)


def test_waiting_is_counted_and_samples_already_read_cause_none(store):
    sealed_r3(store, make_samples())
    manifest = open_manifest(store, 0).all()
    noting = Noting(store)
    noting.go.clear()
    stream = RouteStream(noting, manifest, [1])
    threading.Timer(0.2, noting.go.set).start()
    assert stream[manifest.ids[0]].sets_TLK.shape[1] == 1
    waited = stream.wait_s
    assert waited > 0
    noting.go.clear()
    stream[manifest.ids[0]]
    assert stream.wait_s == waited
    noting.go.set()
    stream.close()


def test_an_error_in_the_thread_is_raised_by_the_look_up(store, tmp_path, small):
    """A damaged file affects only its own samples; samples that were read earlier remain
    available."""
    sealed_r3(store, make_samples(prompts=6))
    manifest = open_manifest(store, 0).all()
    (path,) = tmp_path.glob("steps/000000/rollout/00001.*.routes.parquet")
    content = bytearray(path.read_bytes())
    content[50] ^= 1
    path.write_bytes(content)
    stream = RouteStream(store, manifest, GEOMETRY.layers)
    good = [id for id in manifest.ids if int(id.split("/")[1]) % 2 == 0]
    assert [stream[id].valid_T.shape for id in good]
    with pytest.raises(StoreError, match=path.name):
        stream[manifest.ids[-1]]
    stream.close()


def test_an_error_of_the_store_is_raised(store):
    sealed_r3(store, make_samples())
    manifest = open_manifest(store, 0).all()

    class Failing(Noting):
        def read_ranges(self, key, ranges, size):
            raise StoreError(f"read {key}: the server is gone")

    stream = RouteStream(Failing(store), manifest, [1])
    with pytest.raises(StoreError, match="the server is gone"):
        stream[manifest.ids[0]]
    stream.close()


def test_closing_ends_the_fetching(store, small):
    """Looking up a sample that was not fetched by then raises an error."""
    sealed_r3(store, make_samples(prompts=6, n=3))
    manifest = open_manifest(store, 0).all()
    noting = Noting(store)
    noting.go.clear()
    stream = RouteStream(noting, manifest, [1])
    threading.Timer(0.1, noting.go.set).start()
    stream.close()
    with pytest.raises(TraceError, match="the stream ended before reading it"):
        stream[manifest.ids[-1]]


def test_unknown_layers_and_samples_are_refused(store):
    sealed_r3(store, make_samples())
    manifest = open_manifest(store, 0).all()
    with pytest.raises(TraceError, match=r"no routes for layers \[4\]"):
        RouteStream(store, manifest, [1, 4])
    stream = RouteStream(store, manifest, [1])
    with pytest.raises(KeyError):
        stream["000000/99/0"]
    assert np.array_equal(sorted(stream), sorted(manifest.ids))
    stream.close()
