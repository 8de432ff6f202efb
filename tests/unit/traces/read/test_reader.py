"""Only the required bytes are fetched, and requests for missing data are refused."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.run.commit import new_write_id, read_commit
from pipeline.traces import (
    Geometry,
    Routes,
    RouteStream,
    TraceError,
    open_manifest,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    write_shard,
)
from tests.samples import (
    GEOMETRY,
    R3,
    equal,
    make_samples,
    random_sets,
    sealed_r3,
)


class Counting:
    """A store that records which bytes are read."""

    def __init__(self, store) -> None:
        self._store = store
        self.uri = store.uri
        self.ranges: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def read_ranges(self, key: str, ranges: list[tuple[int, int]], size: int) -> list[bytes]:
        self.ranges += [(key, *range_) for range_ in ranges]
        return self._store.read_ranges(key, ranges, size)


def test_a_slice_fetches_only_its_own_bytes(store, monkeypatch, small_row_groups):
    """For two neighbouring layers of a sample, the reader fetches the footer and, in each of the
    sample's row groups, the columns for the segments and the two layers. It fetches no byte of
    any other layer or row group."""
    rng = np.random.default_rng(0)
    geometry = Geometry(64, 8, tuple(range(8)))
    samples = [
        replace(s, routes=Routes(random_sets(rng, len(s.tokens_S) - 1, geometry), s.routes.valid_T))
        for s in make_samples(prompts=6, n=2)
    ]
    write_shard(store, 0, 0, new_write_id(), samples, geometry, R3)
    manifest = seal(store, 0, 1, lambda _: [s.id for s in samples], 0).all()
    counting = Counting(store)
    wanted = samples[5]
    found = read_routes(counting, manifest, [wanted.id], [3, 4])
    assert equal(found[wanted.id], Routes(wanted.routes.sets_TLK[:, 3:5], wanted.routes.valid_T))

    (file,) = (
        f
        for f in read_commit(store, "steps/000000/rollout/00000.json")["files"]
        if f["role"] == "routes"
    )
    (row,) = (r for r in manifest.rows.to_pylist() if r["id"] == wanted.id)
    firsts = np.cumsum([0, *(g["rows"] for g in file["row_groups"])])
    groups = {
        int(np.searchsorted(firsts, p["row"], "right")) - 1 for p in row["routes"][0]["segments"]
    }
    assert len(groups) < len(file["row_groups"])
    names = ("owner", "token_start", "tokens", "validity", "layer_00003", "layer_00004")
    chunks = [
        chunk[:2]
        for g in groups
        for leaf, chunk in zip(file["leaves"], file["row_groups"][g]["chunks"], strict=True)
        if leaf in names
    ]
    needed = {at + i for at, length in (*chunks, file["footer"][:2]) for i in range(length)}
    fetched = [at + i for _, at, length in counting.ranges for i in range(length)]
    assert len(fetched) == len(needed)
    assert set(fetched) == needed


def test_unknown_samples_and_layers_are_refused(store):
    manifest = sealed_r3(store, make_samples())
    with pytest.raises(TraceError, match="unknown: 000000/9/0"):
        read_samples(store, manifest, ["000000/9/0"])
    with pytest.raises(
        TraceError, match=r"no routes for layers \[0, 4\], expected layers of \(1, 2, 5\)"
    ):
        read_routes(store, manifest, manifest.ids, [4, 1, 0])


@pytest.mark.parametrize("layers", [[], [GEOMETRY.layers[0]] * 2])
def test_layers_must_be_given_once_each(store, layers):
    samples = make_samples()
    sealed_r3(store, samples)
    with pytest.raises(TraceError, match=r"layers \[.*\], expected at least one, and each once"):
        read_routes(store, read_manifest(store, 0), [samples[0].id], layers)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([True], "layers: True of type bool, expected an integer"),
        (np.array([False, True]), "layers: .*False.* of type bool, expected an integer"),
        ([1.0], "layers: 1.0 of type float, expected an integer"),
        (np.array([1.0]), "layers: .*1.0.* of type float64, expected an integer"),
        ([[1]], r"layers: \[1\] of type list, expected an integer"),
        ([None], "layers: None of type NoneType, expected an integer"),
        ([-1], r"layers: -1, expected 0\.\.99999"),
        ([2**70], r"layers: \d+, expected 0\.\.99999"),
        (1, "layers: 1, expected a list of numbers"),
        ("1", "layers: 1, expected a list of numbers"),
    ],
)
def test_layers_that_are_not_numbers_are_refused(store, layers, says):
    """True would read layer 1."""
    manifest = sealed_r3(store, make_samples())
    with pytest.raises(TraceError, match=f"step 0: {says}"):
        read_routes(store, manifest, manifest.ids[:1], layers)


def test_layers_may_be_numpy_integers_and_come_from_a_generator(store):
    manifest = sealed_r3(store, make_samples())
    expected = read_routes(store, manifest, manifest.ids, [5, 1])
    for layers in (np.array([5, 1]), (layer for layer in [5, 1]), np.array([5, 1], ">i2")):
        found = read_routes(store, manifest, manifest.ids, layers)
        assert all(equal(found[id], expected[id]) for id in manifest.ids)


@pytest.mark.parametrize("read", [read_samples, read_routes])
def test_samples_and_routes_are_not_read_without_rows(store, read):
    manifest = sealed_r3(store, make_samples())
    for given in (open_manifest(store, 0), None):
        with pytest.raises(TraceError, match=f"{read.__name__}: found a .*, expected a Manifest"):
            read(store, given, manifest.ids)


@pytest.mark.parametrize("step", ["0", False, -1, 10**6, None, 0.5])
def test_a_malformed_step_is_refused(store, step):
    with pytest.raises(TraceError, match="step"):
        read_manifest(store, step)


def test_an_unknown_column_is_refused(store):
    sealed_r3(store, make_samples())
    with pytest.raises(TraceError, match="no column nope, expected columns of"):
        open_manifest(store, 0).columns(["id", "nope"])


@pytest.mark.parametrize("order", [(1, 2, 5), (5, 2, 1), (2, 5, 1)])
def test_the_routes_digest_is_compared_whatever_the_order_of_the_layers(store, order):
    manifest = sealed_r3(store, make_samples())
    right = read_routes(store, manifest, manifest.ids, order)
    for id, routes in read_routes(store, manifest, manifest.ids).items():
        at = [GEOMETRY.layers.index(layer) for layer in order]
        assert np.array_equal(right[id].sets_TLK, routes.sets_TLK[:, at])
    wrong = pa.array(["0" * 64] * len(manifest.ids))
    index = manifest.rows.schema.get_field_index("routes_digest")
    field = manifest.rows.schema.field(index)
    forged = replace(manifest, rows=manifest.rows.set_column(index, field, wrong))
    with pytest.raises(TraceError, match="its routes have digest"):
        read_routes(store, forged, forged.ids, order)
    with pytest.raises(TraceError, match="its routes have digest"):
        RouteStream(store, forged, order)[forged.ids[0]]


@pytest.mark.parametrize("rows", [np.array([True, False]), [2**70], [0.0]])
def test_rows_of_a_manifest_must_be_integers(store, rows):
    sealed_r3(store, make_samples())
    with pytest.raises(TraceError, match=r"step 0: rows of type .*, expected row numbers"):
        open_manifest(store, 0).select(rows)


def test_ids_may_come_from_an_iterator(store):
    manifest = sealed_r3(store, make_samples())
    assert [sample.id for sample in read_samples(store, manifest, iter(manifest.ids))] == (
        manifest.ids
    )
    assert list(read_routes(store, manifest, iter(manifest.ids))) == manifest.ids
