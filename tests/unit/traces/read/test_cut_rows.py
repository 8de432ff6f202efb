"""A sample's rows are joined if they are spread over several files, each with different layers or
positions."""

import itertools
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.model.geometry import Geometry
from pipeline.run.commit import commit, new_write_id
from pipeline.traces import Routes, RouteStream, TraceError, read_routes, routes_digest
from pipeline.traces.format.header import read_header, with_header
from pipeline.traces.format.manifest import FileRef, Manifest
from pipeline.traces.format.schema import MANIFEST
from pipeline.traces.write.routes_file import RoutesFile
from pipeline.traces.write.segments import SegmentWriter
from tests.memory_store import MemoryStore
from tests.samples import GEOMETRY, R2, random_sets

ID, GROUP = "000000/0/0", "000000/0"


def cut_manifest(store, routes, cuts):
    """Write the routes files of one sample, and return the manifest of its step.

    Each cut describes one file: its layers and ranges of positions. A third item, if present, gives
    the sample different routes in this file.
    """
    refs, parts, digests = [], [], []
    for number, (layers, ranges, *other) in enumerate(cuts):
        here = other[0] if other else routes
        geometry = Geometry(GEOMETRY.experts, GEOMETRY.topk, layers)
        columns = [GEOMETRY.layers.index(layer) for layer in layers]
        mine = Routes(here.sets_TLK[:, columns], here.valid_T)
        name = f"part-{number}"
        with RoutesFile(store, f"{name}.parquet", geometry, R2) as file:
            segments = SegmentWriter(file)
            places = [place for range_ in ranges for place in segments.add(ID, mine, *range_)]
            segments.finish()
            written = file.finish()
        commit(
            store, f"{name}.json", with_header({}, [written], geometry, R2, None), new_write_id()
        )
        header = read_header(store, f"{name}.json")
        refs.append(FileRef(written.data.key, written.data.sha256, header.key, header.sha256))
        at = np.concatenate([np.arange(*range_) for range_ in ranges] or [np.empty(0, int)])
        digests.append(routes_digest(Routes(mine.sets_TLK[at], mine.valid_T[at]), geometry))
        parts.append({"file": number, "segments": [vars(place) for place in places]})
    row = dict.fromkeys(MANIFEST.names) | {
        "id": ID,
        "group": GROUP,
        "prompt_id": "0",
        "policy_version": 0,
        "prompt_length": len(routes.valid_T) + 1,
        "response_length": 0,
        "token_digest": "",
        "rows_total": len(routes.valid_T),
        "samples": {"file": 0, "row": 0},
        "routes": parts,
    }
    rows = pa.Table.from_pylist([row | {"part_digests": digests}], schema=MANIFEST)
    return Manifest(0, (0,), GEOMETRY, R2, tuple(refs), rows)


def zigzag(rows, ranks):
    """Return the positions of each context-parallel rank r: chunk r counted from the front, and
    chunk r counted from the back."""
    ends = np.linspace(0, rows, 2 * ranks + 1).astype(int).tolist()
    chunks = list(itertools.pairwise(ends))
    return [
        [(a, b) for a, b in (chunks[rank], chunks[-1 - rank]) if a < b] for rank in range(ranks)
    ]


@st.composite
def cuts_of(draw, rows):
    """Draw an assignment of layers to stages, and of positions to the ranks of each stage."""
    stages = draw(
        st.sampled_from([[(1, 2, 5)], [(1, 2), (5,)], [(1,), (2,), (5,)], [(5,), (1, 2)]])
    )
    cuts = []
    for layers in stages:
        if draw(st.booleans()):
            cuts += [(layers, ranges) for ranges in zigzag(rows, draw(st.integers(1, 4)))]
        else:
            ranks = draw(st.integers(1, 3))
            ends = sorted(draw(st.lists(st.integers(1, max(1, rows - 1)), max_size=6, unique=True)))
            pieces = list(itertools.pairwise([0, *(end for end in ends if end < rows), rows]))
            owner = [draw(st.integers(0, ranks - 1)) for _ in pieces]
            cuts += [
                (layers, [piece for piece, of in zip(pieces, owner, strict=True) if of == rank])
                for rank in range(ranks)
            ]
    return draw(st.permutations(cuts))


def recorded(rows, seed):
    rng = np.random.default_rng(seed)
    valid = rng.random(rows) < 0.9
    sets = random_sets(rng, rows, GEOMETRY)
    sets[~valid] = np.arange(GEOMETRY.topk)
    return Routes(sets, valid)


@given(data=st.data(), rows=st.integers(1, 60), seed=st.integers(0, 9))
def test_cut_rows_are_read_completely_and_by_slices(data, rows, seed):
    store = MemoryStore()
    routes = recorded(rows, seed)
    manifest = cut_manifest(store, routes, data.draw(cuts_of(rows)))
    layers = data.draw(st.permutations(GEOMETRY.layers).map(lambda order: order[:2]))
    columns = [GEOMETRY.layers.index(layer) for layer in layers]
    whole = read_routes(store, manifest, [ID])[ID]
    some = read_routes(store, manifest, [ID], layers)[ID]
    ahead = RouteStream(store, manifest, layers)[ID]
    assert np.array_equal(whole.sets_TLK, routes.sets_TLK)
    for found in (whole, some, ahead):
        assert np.array_equal(found.valid_T, routes.valid_T)
    for found in (some, ahead):
        assert np.array_equal(found.sets_TLK, routes.sets_TLK[:, columns])


ALL = GEOMETRY.layers
WRONG = {
    "twice": ([(ALL, [(0, 6)]), (ALL, [(5, 9)])], "position 5 is duplicated"),
    "gap": ([(ALL, [(0, 5)]), (ALL, [(6, 9)])], "position 5 is missing"),
    "no start": ([(ALL, [(1, 9)])], "position 0 is missing"),
    "no end": ([(ALL, [(0, 5)]), (ALL, [(5, 8)])], "8 rows of routes, expected 9"),
    "one layer twice": ([(ALL, [(0, 9)]), ((5,), [(0, 9)])], "position 0 is duplicated"),
    "one layer cut differently": (
        [((1, 2), [(0, 9)]), ((5,), [(0, 4)]), ((5,), [(5, 9)])],
        "position 4 is missing, in layers [5]",
    ),
    "a layer missing": ([((1, 2), [(0, 9)])], "no routes for layers [5]"),
    "order": ([(ALL, [(4, 9), (0, 4)])], "a segment from position 0, expected from 9 or later"),
}


@pytest.mark.parametrize("case", WRONG)
def test_positions_that_do_not_occur_exactly_once_are_refused(case):
    cuts, says = WRONG[case]
    store = MemoryStore()
    manifest = cut_manifest(store, recorded(9, 0), cuts)
    with pytest.raises(TraceError) as error:
        read_routes(store, manifest, [ID])
    assert ID in str(error.value)
    assert says in str(error.value)


def test_files_of_a_sample_must_agree_on_its_valid_rows():
    store = MemoryStore()
    routes = recorded(9, 0)
    other = Routes(routes.sets_TLK, ~routes.valid_T)
    manifest = cut_manifest(store, routes, [((1, 2), [(0, 9)]), ((5,), [(0, 9)], other)])
    with pytest.raises(TraceError, match=r"part-1.*valid rows differ between its files"):
        read_routes(store, manifest, [ID])


def test_a_completely_read_part_is_compared_with_its_digest():
    """A part is the sample's rows in one file. It is compared even if only some of the sample's
    layers are read."""
    store = MemoryStore()
    routes, other = recorded(9, 0), recorded(9, 1)
    other = Routes(other.sets_TLK, routes.valid_T)
    cuts = [((1, 2), [(0, 9)]), ((5,), [(0, 4)]), ((5,), [(4, 9)])]
    manifest = cut_manifest(store, routes, cuts)
    digests = manifest.rows["part_digests"]
    strange = cut_manifest(MemoryStore(), other, cuts).rows["part_digests"].to_pylist()[0]
    assert digests.to_pylist()[0] != strange
    column = manifest.rows.schema.get_field_index("part_digests")
    for number, layers in ((0, (2, 1)), (1, (5,)), (2, None)):
        forged = digests.to_pylist()[0]
        forged[number] = strange[number]
        field = manifest.rows.schema.field(column)
        rows = manifest.rows.set_column(column, field, pa.array([forged], field.type))
        with pytest.raises(TraceError, match=rf"part-{number}.*sample {ID}: .* have digest"):
            read_routes(store, replace(manifest, rows=rows), [ID], layers)
        if number == 0:  # half of the part has no digest
            read_routes(store, replace(manifest, rows=rows), [ID], (1,))
