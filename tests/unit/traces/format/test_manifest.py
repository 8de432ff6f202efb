"""Reading a sealed step's manifest in whole or in part."""

import itertools
import pickle
import sys
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.run import keys
from pipeline.run.commit import new_write_id, read_commit
from pipeline.store import ObjectMissingError
from pipeline.traces import (
    Geometry,
    Manifest,
    TraceError,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    write_shard,
)
from pipeline.traces.format import parquet
from pipeline.traces.format.manifest import open_manifest, sealed_steps
from tests.memory_store import MemoryStore
from tests.samples import GEOMETRY, R3, by_shard, make_samples, sealed_r3, write_shards
from tests.stored_runs import put_signed


def test_only_steps_with_a_manifest_are_listed(store):
    sealed_r3(store, make_samples())
    samples = make_samples(step=12)
    write_shard(store, 12, 0, new_write_id(), samples, GEOMETRY, R3)
    assert sealed_steps(store) == [0]
    seal(store, 12, 1, lambda _: [s.id for s in samples], 0)
    assert sealed_steps(store) == [0, 12]
    with pytest.raises(ObjectMissingError, match=r"steps/000003/manifest\.json"):
        read_manifest(store, 3)


@pytest.mark.parametrize("step", ["0", False, -1, 10**6, None])
def test_a_malformed_step_is_refused(store, step):
    with pytest.raises(TraceError, match="step"):
        read_manifest(store, step)


@pytest.fixture
def many(monkeypatch):
    """Seal a step of two shards with 24 samples, in row groups of 5."""
    monkeypatch.setattr(sys.modules[seal.__module__], "ROW_GROUP_SAMPLES", 5)
    store, samples = MemoryStore(), make_samples(prompts=8, n=3)
    write_shards(store, samples)
    return seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 23), unique=True))
def test_selected_rows_equal_those_of_the_whole_manifest(many, rows):
    """Any rows can be selected, in any order. The other fields equal the whole manifest's."""
    whole, some = many.all(), many.select(rows)
    assert some.rows.equals(whole.rows.take(pa.array(rows, pa.int64())).combine_chunks())
    assert replace(some, rows=None) == replace(whole, rows=None)


def test_only_the_row_groups_of_selected_rows_are_fetched(many, monkeypatch):
    """One of five row groups is fetched, and the footer."""
    monkeypatch.setattr(parquet, "_SMALL", 0)
    fetched = []

    class Noting(MemoryStore):
        def read_ranges(self, key, ranges, size=None):
            fetched.extend(ranges)
            return super().read_ranges(key, ranges, size)

    some = replace(many, store=Noting(many.store.objects)).select([7, 5, 9])
    assert some.rows.equals(many.all().rows.take(pa.array([7, 5, 9])).combine_chunks())
    in_rows = sum(length for _, length in fetched) - many.file.footer_size
    assert 0 < in_rows < (many.file.size - many.file.footer_size) / 4
    assert len(set(fetched)) == len(fetched)


def test_columns_and_batches_are_read_alone(many):
    """Groups are dictionary-coded. Names may come from a generator."""
    table, whole = many.columns(name for name in ["group", "rows_total"]), many.all()
    assert pa.types.is_dictionary(table["group"].type)
    for name in ("group", "rows_total"):
        assert table[name].to_pylist() == whole.rows[name].to_pylist()
    found = list(many.batches(["id"]))
    assert [len(batch) for batch in found] == [5, 5, 5, 5, 4]
    assert [id for batch in found for id in batch["id"].to_pylist()] == whole.ids
    groups = whole.rows["group"].to_pylist()
    assert len(list(itertools.groupby(groups))) == len(set(groups)), "a group's rows are adjacent"


def test_a_pickled_manifest_reads_the_same_rows(store):
    """Workers of torch's DataLoader receive pickled manifests."""
    sealed_r3(store, make_samples())
    sealed = open_manifest(store, 0)
    assert pickle.loads(pickle.dumps(sealed)).all().rows.equals(sealed.all().rows)
    assert pickle.loads(pickle.dumps(sealed.all())).ids == sealed.all().ids


@pytest.mark.parametrize(
    "rows", [[24], [-1, 3], None, 1, "1", [[0, 1]], [True], [1.0], np.ma.masked_array([0], [1])]
)
def test_rows_that_are_not_row_numbers_are_refused(many, rows):
    with pytest.raises(TraceError, match="row"):
        many.select(rows)


@pytest.mark.parametrize("names", [None, "id", ["id", "id"], ["id", "x"], [1]])
def test_columns_that_do_not_exist_or_occur_twice_are_refused(many, names):
    for read in (many.columns, lambda names: list(many.batches(names))):
        with pytest.raises(TraceError, match="step 0: columns: "):
            read(names)


@pytest.mark.parametrize("ids", [3, "000000/0/0", [b"000000/0/0"], [0], ["000000/9/9"]])
def test_ids_that_are_not_those_of_samples_are_refused(many, ids):
    whole = many.all()
    for read in (
        whole.select,
        lambda ids: list(whole.id_batches(ids)),
        lambda ids: read_samples(many.store, whole, ids),
        lambda ids: read_routes(many.store, whole, ids),
    ):
        with pytest.raises(TraceError, match="step 0: "):
            read(ids)


def test_fields_that_a_later_version_adds_are_ignored(store):
    """They may occur at every level of a commit. A later major version is refused."""
    expected = sealed_r3(store, make_samples())
    body = read_commit(store, keys.manifest(0))
    for part in (body, *body["files"], *body["data"], body["provenance"], body["geometry"]):
        part["new"] = {"of": "a later version"}
    put_signed(store, keys.manifest(0), {**body, "format": "2.9"})
    assert read_manifest(store, 0).rows.equals(expected.rows)
    for version in ("1.1", "3.0", 2, None):
        put_signed(store, keys.manifest(0), {**body, "format": version})
        with pytest.raises(TraceError, match=r"manifest\.json in .*format"):
            read_manifest(store, 0)


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


def test_a_sealed_step_names_the_weights_of_all_its_shards(store):
    """If a shard does not name its weights, nor does the step."""
    for step, second in enumerate(("a" * 64, None, "b" * 64)):
        samples = make_samples(step=step)
        for shard, digest in enumerate(("a" * 64, second)):
            mine = [s for s in samples if int(s.prompt_id) % 2 == shard]
            named = {"policies": None if digest is None else {0: digest}}
            write_shard(store, step, shard, new_write_id(), mine, GEOMETRY, R3, **named)
        ids = by_shard([s.id for s in samples], 2)
        if step < 2:
            known = {0: "a" * 64} if step == 0 else None
            assert seal(store, step, 2, ids, 0).head.policies == known
        else:
            with pytest.raises(TraceError, match=f"{keys.rollout(2, 1)}: policy 0"):
                seal(store, 2, 2, ids, 0)
    assert sealed_steps(store) == [0, 1]
