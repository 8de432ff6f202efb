"""Samples and routes that are read ahead equal those of a reader, and each byte is fetched once."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.store import StoreError, open_store
from pipeline.traces import (
    RouteStream,
    SampleStream,
    TraceError,
    open_manifest,
    read_manifest,
    read_routes,
    read_samples,
    used_routes,
)
from pipeline.traces.format import parquet
from pipeline.traces.read import stream as stream_module
from tests.samples import (
    GEOMETRY,
    equal,
    make_samples,
    of_one_token,
    same_sample,
    sealed_r2,
    sealed_r3,
)


@pytest.fixture
def small(monkeypatch, small_row_groups):
    """Fetch ranges of many small row groups, a few row groups at a time."""
    monkeypatch.setattr(stream_module, "_AT_ONCE_BYTES", 2_000)
    monkeypatch.setattr(parquet, "_SMALL", 0)


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
    samples[5] = of_one_token(samples[5])  # it has no rows, so no file contains it
    seal(store, samples)
    manifest = used_routes(store, 0)
    ids = data.draw(st.lists(st.sampled_from(manifest.ids), unique=True))
    layers = data.draw(st.lists(st.sampled_from(GEOMETRY.layers), unique=True, min_size=1))
    stream = RouteStream(store, replace(manifest, rows=manifest.select(ids)), layers)
    expected = read_routes(store, manifest, ids, layers)
    for id in data.draw(st.permutations(ids)):
        assert equal(stream[id], expected[id])
        assert stream[id].sets_TLK.dtype == expected[id].sets_TLK.dtype
    assert list(stream) == ids
    stream.close()


def test_streamed_samples_equal_those_of_a_reader(store):
    """There are more samples than are read at a time, and they are not in the order of the
    files."""
    sealed_r3(store, make_samples(prompts=14, n=3))
    manifest = open_manifest(store, 0).select(np.random.default_rng(0).permutation(42))
    stream = SampleStream(store, manifest)
    for expected in read_samples(store, manifest, manifest.ids):
        assert same_sample(stream[expected.id], expected)
    assert list(stream) == manifest.ids
    stream.close()


def test_every_range_is_fetched_once_and_counted(store, small):
    sealed_r3(store, make_samples(prompts=6, n=3))
    manifest = read_manifest(store, 0)
    noting = Noting(store)
    stream = RouteStream(noting, manifest, [1, 2])
    assert len(dict(stream)) == 18
    stream.close()
    assert len(set(noting.ranges)) == len(noting.ranges) > 20
    footers = sum(file.footer_size for file in manifest.files if file.role == "routes")
    assert stream.fetched_bytes == sum(length for _, _, length in noting.ranges) - footers


def test_waiting_is_counted_and_samples_already_read_cause_none(store, small):
    manifest = sealed_r3(store, make_samples())
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
    manifest = sealed_r3(store, make_samples(prompts=6))
    (path,) = (tmp_path / "store").glob("steps/000000/rollout/00001.*.routes.parquet")
    content = bytearray(path.read_bytes())
    for at in range(20, len(content) // 2, 20):
        content[at] ^= 1
    path.write_bytes(content)
    stream = RouteStream(store, manifest, GEOMETRY.layers)
    for id in manifest.ids:
        if int(id.split("/")[1]) % 2 == 0:
            assert len(stream[id].valid_T)
    with pytest.raises(StoreError, match=path.name):
        stream[manifest.ids[-1]]
    stream.close()


def test_closing_ends_the_fetching(store, small):
    """Looking up a sample that was not fetched by then raises an error."""
    manifest = sealed_r3(store, make_samples(prompts=6, n=3))
    noting = Noting(store)
    noting.go.clear()
    stream = RouteStream(noting, manifest, [1])
    threading.Timer(0.1, noting.go.set).start()
    stream.close()
    with pytest.raises(TraceError, match=manifest.ids[-1]):
        stream[manifest.ids[-1]]


def test_unknown_layers_and_samples_are_refused(store):
    manifest = sealed_r3(store, make_samples())
    with pytest.raises(TraceError, match=r"no routes for layers \[4\]"):
        RouteStream(store, manifest, [1, 4])
    stream = RouteStream(store, manifest, [1])
    with pytest.raises(KeyError):
        stream["000000/99/0"]
    assert sorted(stream) == sorted(manifest.ids)
    stream.close()
