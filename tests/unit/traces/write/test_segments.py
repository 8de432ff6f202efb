"""Routes are split into segments and row groups, and samples share segments of their prompt."""

import io
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.model.geometry import Geometry
from pipeline.run.commit import new_write_id, read_commit
from pipeline.store import open_store
from pipeline.traces import (
    Routes,
    VersionSpan,
    read_routes,
    seal,
    write_shard,
)
from pipeline.traces.format.codec import encode
from pipeline.traces.format.schema import layer_column
from pipeline.traces.write import segments as segments_module
from pipeline.traces.write.routes_file import RoutesFile
from tests.samples import (
    GEOMETRY,
    R3,
    equal,
    make_samples,
    random_sets,
    sealed_r3,
)


def routes_file(store):
    """Return the rows of the routes file of shard 0."""
    body = read_commit(store, "steps/000000/rollout/00000.json")
    (key,) = (f["key"] for f in body["files"] if f["role"] == "routes")
    return pq.read_table(io.BytesIO(store.read(key))).to_pylist()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(2, 4), st.data())
def test_each_sample_shares_the_rows_that_equal_the_first_samples_prompt(tmp_path, seed, n, data):
    """Sharing ends at the first row with different sets or validity, or at the end of the prompt. A
    sample that differs does not affect the sharing of other samples. All routes survive."""
    samples = make_samples(prompts=1, n=n, seed=seed)
    P = len(samples[0].prompt_tokens_P)
    victim = data.draw(st.integers(1, n - 1))
    shortest = min(P, len(samples[victim].routes.valid_T))
    differs = data.draw(st.integers(0, shortest))
    if differs < shortest:
        of_victim = samples[victim].routes
        sets, valid = of_victim.sets_TLK.copy(), of_victim.valid_T.copy()
        if data.draw(st.booleans()):
            valid[differs] = False
        else:
            id = next(i for i in range(16) if i not in sets[differs, 1])
            sets[differs, 1] = np.sort([id, *sets[differs, 1, 1:]])
        samples[victim] = replace(samples[victim], routes=Routes(sets, valid))
    store = open_store(str(tmp_path / new_write_id()))
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    manifest = seal(store, 0, 1, lambda _: [s.id for s in samples], 0).all()
    rows = routes_file(store)
    for i, sample in enumerate(samples):
        (part,) = manifest.select([sample.id])["routes"][0].as_py()
        owners = {rows[p["row"]]["owner"]: p["tokens"] for p in part["segments"]}
        common = differs if i == victim else min(P, len(sample.routes.valid_T))
        assert owners.get(sample.group, 0) == common
        assert set(owners) <= {sample.group, sample.id}
    stored = sum(row["tokens"] for row in rows)
    own = sum(len(s.routes.valid_T) for s in samples)
    most = [min(P, len(s.routes.valid_T)) for s in samples[1:]]
    most[victim - 1] = differs
    assert stored == own - sum(most)
    found = read_routes(store, manifest, manifest.ids)
    assert all(equal(found[s.id], s.routes) for s in samples)


def test_prompts_that_differ_are_not_shared(store):
    """If the tokens differ, equal rows are a coincidence."""
    one, two = make_samples(prompts=1, n=2)
    two = replace(two, prompt_tokens_P=one.prompt_tokens_P + 1)
    write_shard(store, 0, 0, new_write_id(), [one, two], GEOMETRY, R3)
    assert [row["owner"] for row in routes_file(store)] == [one.group, one.id, two.id]


def test_a_long_sample_is_split_into_segments(store, small_row_groups):
    """No segment or row group exceeds the limit of a row group."""
    rng = np.random.default_rng(0)
    (sample,) = make_samples(prompts=1, n=1)
    G = 200
    T = len(sample.prompt_tokens_P) + G - 1
    sample = replace(
        sample,
        response_tokens_G=np.arange(G, dtype=np.uint32),
        loss_mask_G=np.ones(G, bool),
        logprobs_G=np.zeros(G, np.float32),
        version_spans=(VersionSpan(0, 0, G),),
        routes=Routes(random_sets(rng, T, GEOMETRY), rng.random(T) < 0.5),
    )
    write_shard(store, 0, 0, new_write_id(), [sample], GEOMETRY, R3)
    rows = routes_file(store)
    assert len(rows) > 3
    assert max(row["tokens"] for row in rows) <= segments_module.ROW_GROUP_TOKENS
    manifest = seal(store, 0, 1, lambda _: [sample.id], 0).all()
    assert equal(read_routes(store, manifest, [sample.id])[sample.id], sample.routes)


@pytest.mark.parametrize("experts", [16, 300])
@pytest.mark.parametrize("order", ["TLK", "LTK", "KTL"])
def test_the_memory_layout_of_routes_does_not_affect_the_file(store, order, experts):
    """The caller chooses the memory layout. In the file, the rows of each layer are contiguous."""
    geometry = Geometry(experts, 4, (1, 3))
    sets_TLK = random_sets(np.random.default_rng(0), 12, geometry)
    axes = ["TLK".index(letter) for letter in order]
    in_memory = np.ascontiguousarray(sets_TLK.transpose(axes)).transpose(np.argsort(axes))
    routes = Routes(in_memory, np.ones(12, np.bool_))
    key = f"{order}.parquet"
    with RoutesFile(store, key, geometry, R3) as file:
        writer = segments_module.SegmentWriter(file)
        for owner, start, end in (("a", 0, 7), ("b", 7, 12)):
            writer.add(owner, routes, start, end)
        writer.finish()
        file.finish()
    rows = pq.read_table(io.BytesIO(store.read(key))).to_pylist()
    for row, part_TLK in zip(rows, (sets_TLK[:7], sets_TLK[7:]), strict=True):
        for number, layer in enumerate(geometry.layers):
            assert row[layer_column(layer)] == encode(part_TLK[:, number], experts)


def test_row_groups_end_by_token_count(store, small_row_groups):
    """A row group ends when it is full, or at the end of a group of samples if it is at least half
    full by then. A group of samples that fits into a row group is not divided."""
    sealed_r3(store, make_samples(prompts=6))
    for info in store.list("steps/000000/rollout/"):
        if info.key.endswith(".routes.parquet"):
            file = pq.ParquetFile(f"{store.uri.removeprefix('file://')}/{info.key}")
            assert file.num_row_groups > 2
            for g in range(file.num_row_groups):
                tokens = sum(file.read_row_group(g)["tokens"].to_pylist())
                assert 5 <= tokens <= 10 or g == file.num_row_groups - 1


def test_sharing_makes_files_smaller(store, tmp_path):
    """The rows of a long prompt are stored only once for its sixteen samples."""
    rng = np.random.default_rng(0)
    sample = make_samples(prompts=1, n=1, known=1.0)[0]
    prompt_P = rng.integers(0, 100, 400).astype(np.uint32)
    sets = random_sets(rng, 400 + len(sample.response_tokens_G) - 1, GEOMETRY)
    routes = Routes(sets, np.ones(len(sets), np.bool_))
    sample = replace(sample, prompt_tokens_P=prompt_P, routes=routes)
    samples = [replace(sample, id=f"000000/0/{k}") for k in range(16)]
    alone = open_store(str(tmp_path / "alone"))
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    write_shard(alone, 0, 0, new_write_id(), samples[:1], GEOMETRY, R3)
    sizes = [
        next(f["size"] for f in read_commit(s, "steps/000000/rollout/00000.json")["files"])
        for s in (store, alone)
    ]
    assert sizes[0] < 1.5 * sizes[1]
