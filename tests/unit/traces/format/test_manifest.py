"""Reading a sealed step's manifest in whole or in part, including manifests of later minor
versions."""

import itertools
import json
import pickle
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.run.commit import content_digest, new_write_id
from pipeline.store import ObjectMissingError
from pipeline.traces import (
    Geometry,
    TraceError,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    write_shard,
)
from pipeline.traces.format.manifest import Manifest, sealed_steps
from tests.samples import (
    GEOMETRY,
    R3,
    by_shard,
    make_samples,
    sealed_r3,
    write_shards,
)


def test_only_steps_with_a_manifest_are_listed(store):
    """Unsealed steps are not listed."""
    sealed_r3(store, make_samples())
    samples = make_samples(step=12)
    write_shard(store, 12, 0, new_write_id(), samples, GEOMETRY, R3)
    assert sealed_steps(store) == [0]
    seal(store, 12, 1, lambda _: [s.id for s in samples], 0)
    assert sealed_steps(store) == [0, 12]
    with pytest.raises(ObjectMissingError, match=r"steps/000003/manifest\.json"):
        read_manifest(store, 3)


@pytest.fixture
def many(store, monkeypatch):
    """Seal a step of two shards with 24 samples, in row groups of 5."""
    monkeypatch.setattr(sys.modules[seal.__module__], "ROW_GROUP_SAMPLES", 5)
    samples = make_samples(prompts=8, n=3)
    write_shards(store, samples)
    return seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 23), unique=True))
def test_selected_rows_equal_those_of_the_whole_manifest(many, rows):
    """Any rows can be selected, in any order. The other fields equal the whole manifest's."""
    whole, some = many.all(), many.select(rows)
    assert some.rows.equals(whole.rows.take(pa.array(rows, pa.int64())).combine_chunks())
    assert replace(some, rows=None) == replace(whole, rows=None)


def test_only_the_row_groups_of_selected_rows_are_read(many):
    fetched = []

    class Noting:
        uri = many.store.uri

        def read_ranges(self, key, ranges, size):
            fetched.extend(ranges)
            return many.store.read_ranges(key, ranges, size)

    replace(many, store=Noting()).select([5, 9, 20])
    chunks = [chunk for g in (1, 4) for chunk in many.file.row_groups[g].chunks]
    assert set(fetched) == {(r.offset, r.length) for r in [*chunks, many.file.footer]}


def test_single_columns_are_read_and_groups_are_dictionary_coded(many):
    table = many.columns(["group", "rows_total"])
    assert table["rows_total"].to_pylist() == many.all().rows["rows_total"].to_pylist()
    assert pa.types.is_dictionary(table["group"].type)
    assert table["group"].to_pylist() == many.all().rows["group"].to_pylist()


def test_a_pickled_manifest_reads_the_same_rows(store):
    """Workers of torch's DataLoader receive pickled manifests."""
    samples = make_samples()
    write_shards(store, samples)
    sealed = seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0)
    other = pickle.loads(pickle.dumps(sealed))
    assert other.all().rows.equals(sealed.all().rows)
    assert pickle.loads(pickle.dumps(sealed.all())).ids == sealed.all().ids


def test_rows_out_of_range_are_refused(many):
    for rows, beyond in (([24], 24), ([-1, 3], -1)):
        with pytest.raises(TraceError, match=rf"row {beyond}, expected 0\.\.23"):
            many.select(rows)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (None, "rows of type object and shape (), expected row numbers in one dimension"),
        (1, "rows of type int64 and shape ()"),
        ("1", "rows of type <U1 and shape ()"),
        ([[0, 1]], "rows of type int64 and shape (1, 2)"),
        ([[0], [1, 2]], "rows of type list cannot become an array"),
        ([True, False], "rows of type bool"),
        ([1.0], "rows of type float64"),
        (np.ma.masked_array([0, 1], [0, 1]), "rows is a masked array"),
    ],
)
def test_rows_that_are_not_row_numbers_are_refused(many, rows, says):
    with pytest.raises(TraceError) as refused:
        many.select(rows)
    assert f"step 0: {says}" in str(refused.value)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (None, "columns: None, expected a list of texts"),
        ("id", "columns: id, expected a list of texts"),
        (["id", "id"], "columns: duplicated: id"),
        (["id", "x"], "columns: no column x, expected columns of ["),
        ([1], "columns: 1 of type int, expected text"),
    ],
)
def test_columns_that_do_not_exist_or_occur_twice_are_refused(many, names, says):
    for read in (many.columns, lambda names: list(many.batches(names))):
        with pytest.raises(TraceError) as refused:
            read(names)
        assert f"step 0: {says}" in str(refused.value)


def test_names_and_ids_may_come_from_a_generator(many):
    """The generator is read once."""
    whole = many.all()
    assert many.columns(name for name in ["id"]).equals(many.columns(["id"]))
    found = list(many.batches(name for name in ["id"]))
    assert [table.column_names for table in found] == [["id"]] * 5
    assert whole.select(id for id in whole.ids[3:5]).equals(whole.select(whole.ids[3:5]))
    assert list(whole.id_batches(id for id in whole.ids)) == [whole.ids]
    assert read_samples(many.store, whole, iter(whole.ids[:2]))[1].id == whole.ids[1]
    assert list(read_routes(many.store, whole, iter(whole.ids[:2]))) == whole.ids[:2]


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (None, "None, expected a list of texts"),
        (3, "3, expected a list of texts"),
        ("000000/0/0", "000000/0/0, expected a list of texts"),
        (np.array("000000/0/0"), "expected a list of texts"),
        ([b"000000/0/0"], "of type bytes, expected text"),
        ([0], "0 of type int, expected text"),
        ([None], "None of type NoneType, expected text"),
        ([["000000/0/0"]], "of type list, expected text"),
        (pa.array(["000000/0/0"]), "of type StringScalar, expected text"),
    ],
)
def test_ids_that_are_not_text_are_refused(many, ids, says):
    whole = many.all()
    reads = [
        whole.select,
        lambda ids: read_samples(many.store, whole, ids),
        lambda ids: read_routes(many.store, whole, ids),
    ]
    for read in reads + ([lambda ids: list(whole.id_batches(ids))] if ids is not None else []):
        with pytest.raises(TraceError) as refused:
            read(ids)
        assert "step 0: ids: " in str(refused.value)
        assert says in str(refused.value)


def test_the_samples_of_a_group_are_adjacent(many):
    groups = many.all().rows["group"].to_pylist()
    assert len([1 for a, b in itertools.pairwise(groups) if a != b]) == len(set(groups)) - 1


def test_keys_that_a_later_version_adds_are_ignored(store, tmp_path):
    """Such keys may occur at every level of a commit."""
    samples = make_samples()
    expected = sealed_r3(store, samples)
    path = tmp_path / "steps/000000/manifest.json"
    body = json.loads(path.read_text())
    (rows,) = body["files"]
    for part in (body, rows, *rows["row_groups"], *body["data"], body["provenance"]):
        part["new"] = {"of": "a later version"}
    body["geometry"]["new"] = 1
    body["format"] = "1.9"
    del body["content_sha256"]
    path.write_text(json.dumps({**body, "content_sha256": content_digest(body)}))
    assert read_manifest(store, 0).rows.equals(expected.rows)


def test_a_file_with_a_role_of_a_later_version_is_skipped(store, tmp_path):
    """A shard whose commit also lists such a file is sealed and read without it."""
    samples = make_samples()
    write_shards(store, samples)
    path = tmp_path / "steps/000000/rollout/00000.json"
    body = json.loads(path.read_text())
    (file,) = (file for file in body["files"] if file["role"] == "samples")
    body["files"].insert(0, {**file, "role": "router_scores", "sha256": "f" * 64})
    del body["content_sha256"]
    path.write_text(json.dumps({**body, "content_sha256": content_digest(body)}))
    manifest = seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0).all()
    assert len(read_routes(store, manifest, manifest.ids)) == len(samples)
    assert len(read_samples(store, manifest, manifest.ids)) == len(samples)


@given(st.lists(st.sampled_from([0, 1, 40, 4_000, 9_000, 20_000]), min_size=1, max_size=12))
def test_batches_hold_at_most_their_bytes(rows):
    """Batches contain every id once and in order. A batch exceeds the limit only if it consists of
    one sample, and a batch ends only if the next sample does not fit."""
    geometry = Geometry(128, 8, tuple(range(96)))
    ids = [f"000000/{i}/0" for i in range(len(rows))]
    table = pa.table({"id": ids, "rows_total": rows})
    manifest = Manifest(0, (0,), geometry, R3, (), table)
    batches = list(manifest.id_batches())
    assert list(itertools.chain(*batches)) == ids
    sizes = [[rows[manifest.numbers[id]] * (96 * 8 + 16) for id in batch] for batch in batches]
    assert all(sum(of) <= 64 << 20 or len(of) == 1 for of in sizes)
    assert all(sum(a) + b[0] > 64 << 20 for a, b in itertools.pairwise(sizes))
    assert list(manifest.id_batches(ids[1:2])) == ([ids[1:2]] if ids[1:] else [])
