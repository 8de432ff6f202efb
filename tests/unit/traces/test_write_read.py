"""What was written is what is read, and only what is wanted is fetched."""

import io
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.store import open_store
from pipeline.store.commit import new_attempt, read_commit
from pipeline.traces import (
    Geometry,
    Provenance,
    Routes,
    ShardWriter,
    TraceError,
    VersionSpan,
    read_manifest,
    read_routes,
    read_sample_file,
    read_samples,
    routes_digest,
    seal,
    token_digest,
    write_samples,
    write_shard,
)
from pipeline.traces import segments as segments_module
from tests.unit.traces.make import (
    GEOMETRY,
    R3,
    equal,
    make_samples,
    planned_ids,
    random_sets,
    sealed_r3,
    without_routes,
)


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


@pytest.fixture
def small_row_groups(monkeypatch) -> None:
    """Many row groups from few tokens."""
    monkeypatch.setattr(segments_module, "ROW_GROUP_TOKENS", 10)


def same_sample(found, expected) -> bool:
    arrays = ("prompt_tokens_P", "response_tokens_G", "loss_mask_G", "logprobs_G")
    values = ("id", "group", "prompt_id", "finish_reason", "version_spans", "seed", "reward")
    values = (*values, "reward_error", "extras")
    return all(
        np.array_equal(getattr(found, n), getattr(expected, n))
        and getattr(found, n).dtype == getattr(expected, n).dtype
        for n in arrays
    ) and all(getattr(found, n) == getattr(expected, n) for n in values)


@pytest.mark.parametrize("experts", [16, 256, 300])
def test_samples_and_routes_survive(store, experts, small_row_groups):
    """Over shards and row groups, in the order asked for, with and without a layer selection."""
    geometry = Geometry(experts, 4, (1, 2, 5))
    samples = make_samples(prompts=5, n=3, geometry=geometry)
    write_shard(store, 0, 0, new_attempt(), samples[:6], geometry, R3)
    write_shard(store, 0, 1, new_attempt(), samples[6:], geometry, R3)
    ids = [sample.id for sample in samples]
    manifest = seal(store, 0, 2, lambda shard: [ids[:6], ids[6:]][shard], 0).all()
    assert (manifest.geometry, manifest.provenance, manifest.ids) == (geometry, R3, sorted(ids))

    found = read_samples(store, manifest, ids[::-1])
    assert all(map(same_sample, found, samples[::-1]))
    routes = read_routes(store, manifest, ids)
    assert list(routes) == ids
    assert all(equal(routes[s.id], s.routes) for s in samples)

    some = read_routes(store, manifest, ids[3:5], [5, 1])
    assert list(some) == ids[3:5]
    for id in some:
        assert np.array_equal(some[id].sets_TLK, routes[id].sets_TLK[:, [2, 0]])

    rows = {row["id"]: row for row in manifest.rows.to_pylist()}
    for sample in samples:
        row = rows[sample.id]
        assert row["token_digest"] == token_digest(sample.tokens_S)
        assert row["routes_digest"] == routes_digest(sample.routes, geometry)
        assert row["rows_valid"] == sample.routes.valid_T.sum()
        assert row["rows_total"] == len(sample.tokens_S) - 1


def test_samples_without_routes(store):
    """A dense model, or a run that records nothing: no geometry, no routes file, null columns."""
    samples = without_routes(make_samples())
    write_shard(store, 0, 0, new_attempt(), samples, None, None)
    manifest = seal(store, 0, 1, lambda _: [sample.id for sample in samples], 0).all()
    assert manifest.geometry is None
    assert manifest.rows["routes"].null_count == manifest.rows["rows_valid"].null_count == 6
    assert all(map(same_sample, read_samples(store, manifest, manifest.ids), samples))
    with pytest.raises(TraceError, match="step 0: its samples have no routes"):
        read_routes(store, manifest, manifest.ids)


def test_an_empty_shard_is_a_shard(store):
    """More shards than prompts: the last ones have nothing, and are joined all the same."""
    samples = make_samples()
    write_shard(store, 0, 0, new_attempt(), samples, GEOMETRY, R3)
    write_shard(store, 0, 1, new_attempt(), [], GEOMETRY, R3)
    manifest = seal(store, 0, 2, lambda shard: [] if shard else planned_ids(), 0).all()
    assert len(read_routes(store, manifest, manifest.ids)) == 6


def test_a_sample_of_one_token_has_no_rows(store):
    """P = 1 and an abort before the first response token: S - 1 = 0 rows."""
    sample = make_samples(prompts=1, n=1)[0]
    nothing = Routes(np.empty((0, 3, 4), np.uint8), np.empty(0, np.bool_))
    sample = replace(
        sample,
        prompt_tokens_P=sample.prompt_tokens_P[:1],
        response_tokens_G=sample.response_tokens_G[:0],
        loss_mask_G=sample.loss_mask_G[:0],
        logprobs_G=sample.logprobs_G[:0],
        version_spans=(VersionSpan(0, 0, 0),),
        routes=nothing,
    )
    write_shard(store, 0, 0, new_attempt(), [sample], GEOMETRY, R3)
    manifest = seal(store, 0, 1, lambda _: [sample.id], 0).all()
    assert same_sample(read_samples(store, manifest, [sample.id])[0], sample)
    assert read_routes(store, manifest, [sample.id])[sample.id].sets_TLK.shape == (0, 3, 4)


def routes_file(store):
    """The rows of shard 0's routes file."""
    body = read_commit(store, "steps/000000/rollout/00000.json")
    (key,) = (f["key"] for f in body["files"] if f["role"] == "routes")
    return pq.read_table(io.BytesIO(store.read(key))).to_pylist()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32), st.integers(2, 4), st.data())
def test_each_sample_shares_what_equals_the_first_ones_prompt(tmp_path, seed, n, data):
    """Sharing ends at the first row that differs in sets or validity, never leaves the prompt, and
    the one sample that differs does not keep the others from sharing; all read back equal."""
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
    store = open_store(str(tmp_path / new_attempt()))
    write_shard(store, 0, 0, new_attempt(), samples, GEOMETRY, R3)
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
    """Equal rows of different tokens are a coincidence."""
    one, two = make_samples(prompts=1, n=2)
    two = replace(two, prompt_tokens_P=one.prompt_tokens_P + 1)
    write_shard(store, 0, 0, new_attempt(), [one, two], GEOMETRY, R3)
    assert [row["owner"] for row in routes_file(store)] == [one.group, one.id, two.id]


@pytest.mark.parametrize("memory_bytes", [0, 400, 1 << 20])
def test_memory_decides_how_groups_lie_but_not_what_is_read(store, memory_bytes, small_row_groups):
    """Samples that come in turn from many groups are held until their group is whole, or the
    memory is full; either way the same routes are read."""
    samples = make_samples(prompts=5, n=4)
    in_turn = sorted(samples, key=lambda s: s.id.split("/")[2])
    with ShardWriter(store, 0, 0, new_attempt(), GEOMETRY, R3, 4, memory_bytes) as writer:
        for sample in in_turn:
            writer.add(sample)
            coded = segments_module.ROW_GROUP_TOKENS * len(GEOMETRY.layers) * GEOMETRY.topk
            assert writer.held_bytes <= memory_bytes + coded
        assert (writer.groups_split == 0) == (memory_bytes == 1 << 20)
        assert writer.commit().ours
    manifest = seal(store, 0, 1, lambda _: [s.id for s in samples], 0).all()
    found = read_routes(store, manifest, manifest.ids)
    assert all(equal(found[s.id], s.routes) for s in samples)
    assert all(map(same_sample, read_samples(store, manifest, [s.id for s in samples]), samples))


def test_a_long_sample_is_cut_into_segments(store, small_row_groups):
    """No segment and no row group is longer than a row group may be."""
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
    write_shard(store, 0, 0, new_attempt(), [sample], GEOMETRY, R3)
    rows = routes_file(store)
    assert len(rows) > 3
    assert max(row["tokens"] for row in rows) <= segments_module.ROW_GROUP_TOKENS
    manifest = seal(store, 0, 1, lambda _: [sample.id], 0).all()
    assert equal(read_routes(store, manifest, [sample.id])[sample.id], sample.routes)


def test_a_writer_that_gives_up_leaves_nothing(store):
    """A sample that no reader would accept ends the shard: no commit, no file."""
    samples = make_samples()
    bad = replace(samples[1], loss_mask_G=samples[1].loss_mask_G[:-1])
    with pytest.raises(TraceError, match=bad.id):
        write_shard(store, 0, 0, new_attempt(), [samples[0], bad], GEOMETRY, R3)
    assert list(store.list("")) == []


class Counting:
    """A store that notes which bytes are read."""

    def __init__(self, store) -> None:
        self._store = store
        self.uri = store.uri
        self.ranges: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def read_ranges(self, key: str, ranges: list[tuple[int, int]]) -> list[bytes]:
        self.ranges += [(key, *range_) for range_ in ranges]
        return self._store.read_ranges(key, ranges)


def test_a_slice_fetches_its_own_bytes_alone(store, monkeypatch, small_row_groups):
    """Two neighbouring layers of one sample: of each of its row groups the segments' columns and
    the two layers, and the footer. No byte of another layer or row group."""
    rng = np.random.default_rng(0)
    geometry = Geometry(64, 8, tuple(range(8)))
    samples = [
        replace(s, routes=Routes(random_sets(rng, len(s.tokens_S) - 1, geometry), s.routes.valid_T))
        for s in make_samples(prompts=6, n=2)
    ]
    write_shard(store, 0, 0, new_attempt(), samples, geometry, R3)
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


def test_row_groups_are_cut_by_tokens(store, small_row_groups):
    """A row group is full, or ends half full where a group ends; no group lies in two of them if it
    fits into one."""
    sealed_r3(store, make_samples(prompts=6))
    for info in store.list("steps/000000/rollout/"):
        if info.key.endswith(".routes.parquet"):
            file = pq.ParquetFile(f"{store.uri.removeprefix('file://')}/{info.key}")
            assert file.num_row_groups > 2
            for g in range(file.num_row_groups):
                tokens = sum(file.read_row_group(g)["tokens"].to_pylist())
                assert 5 <= tokens <= 10 or g == file.num_row_groups - 1


def test_two_writers_of_one_shard(store):
    """The second one's commit is refused and shows the first one's; its files are debris that no
    manifest names; what is read is the first one's alone."""
    first, second = make_samples(seed=1), make_samples(seed=2)
    ours = write_shard(store, 0, 0, "aaaaaaaa", first, GEOMETRY, R3)
    theirs = write_shard(store, 0, 0, "bbbbbbbb", second, GEOMETRY, R3)
    assert ours.ours
    assert not theirs.ours
    assert theirs.body == ours.body
    manifest = seal(store, 0, 1, lambda _: [s.id for s in first], 0).all()
    assert all("aaaaaaaa" in ref.key for ref in manifest.files)
    assert all(map(same_sample, read_samples(store, manifest, manifest.ids), first))


def test_validation_samples(store):
    """Samples alone, without a manifest."""
    samples = without_routes(make_samples())
    file = write_samples(store, "validations/000003/00000.aaaaaaaa.samples.parquet", samples)
    assert all(map(same_sample, read_sample_file(store, file), samples))


def bad_samples() -> Iterator[tuple[object, str]]:
    sample = make_samples(prompts=1, n=1)[0]
    G = len(sample.response_tokens_G)
    routes = sample.routes
    yield replace(sample, routes=None), "no routes"
    longer = Routes(np.concatenate([routes.sets_TLK] * 2), np.concatenate([routes.valid_T] * 2))
    yield replace(sample, routes=longer), "one row per token but the last"
    yield replace(sample, logprobs_G=sample.logprobs_G[1:]), f"{G - 1} values of logprobs_G"
    yield replace(sample, version_spans=()), "version spans"
    yield replace(sample, version_spans=(VersionSpan(0, 0, G + 1),)), "version spans"
    yield replace(sample, extras={"score": float("nan")}), "extras are not JSON values"
    yield replace(sample, extras={"score": object()}), "extras are not JSON values"
    yield replace(sample, prompt_tokens_P=sample.prompt_tokens_P[:0]), "no prompt token"


@pytest.mark.parametrize(("sample", "says"), list(bad_samples()))
def test_samples_that_do_not_fit_together_are_refused(store, sample, says):
    """With the sample's id, and before anything is committed."""
    with pytest.raises(TraceError, match=f"sample 000000/0/0: .*{says}"):
        write_shard(store, 0, 0, new_attempt(), [sample], GEOMETRY, R3)
    assert store.size("steps/000000/rollout/00000.json") is None


def test_contradictions_of_a_shard_are_refused(store):
    samples = make_samples()
    with pytest.raises(TraceError, match="geometry and provenance go together"):
        write_shard(store, 0, 0, new_attempt(), samples, GEOMETRY, None)
    with pytest.raises(TraceError, match="it has routes, but its shard has no geometry"):
        write_shard(store, 0, 0, new_attempt(), samples, None, None)
    with pytest.raises(TraceError, match="sample 000000/0/1 is there twice"):
        write_shard(store, 0, 0, new_attempt(), [*samples, samples[1]], GEOMETRY, R3)


def test_unknown_samples_and_layers_are_refused(store):
    manifest = sealed_r3(store, make_samples())
    with pytest.raises(TraceError, match="unknown: 000000/9/0"):
        read_samples(store, manifest, ["000000/9/0"])
    with pytest.raises(TraceError, match=r"no routes of layers \[0, 4\]; it has \(1, 2, 5\)"):
        read_routes(store, manifest, manifest.ids, [4, 1, 0])


def test_provenance_comes_back(store):
    samples = make_samples(version=7, step=8)
    made_by = Provenance("R3", 7, "vllm 0.32.0")
    write_shard(store, 8, 0, new_attempt(), samples, GEOMETRY, made_by)
    seal(store, 8, 1, lambda _: [s.id for s in samples], 7)
    manifest = read_manifest(store, 8)
    assert manifest.provenance == made_by
    assert manifest.policy_version == 7
    assert set(manifest.rows["policy_version"].to_pylist()) == {7}


def test_sharing_makes_files_smaller(store, tmp_path):
    """Of sixteen samples of a long prompt its rows are stored once."""
    rng = np.random.default_rng(0)
    sample = make_samples(prompts=1, n=1, known=1.0)[0]
    prompt_P = rng.integers(0, 100, 400).astype(np.uint32)
    sets = random_sets(rng, 400 + len(sample.response_tokens_G) - 1, GEOMETRY)
    routes = Routes(sets, np.ones(len(sets), np.bool_))
    sample = replace(sample, prompt_tokens_P=prompt_P, routes=routes)
    samples = [replace(sample, id=f"000000/0/{k}") for k in range(16)]
    alone = open_store(str(tmp_path / "alone"))
    write_shard(store, 0, 0, new_attempt(), samples, GEOMETRY, R3)
    write_shard(alone, 0, 0, new_attempt(), samples[:1], GEOMETRY, R3)
    sizes = [
        next(f["size"] for f in read_commit(s, "steps/000000/rollout/00000.json")["files"])
        for s in (store, alone)
    ]
    assert sizes[0] < 1.5 * sizes[1]
