"""What was written is what is read, and only what is wanted is fetched."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.store import open_store
from pipeline.store.commit import new_attempt, read_commit
from pipeline.traces import (
    Geometry,
    Provenance,
    Routes,
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
from pipeline.traces.segments import cut
from tests.unit.traces.make import (
    GEOMETRY,
    R3,
    equal,
    make_samples,
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
    manifest = seal(store, 0, 2, ids, 0)
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
    manifest = seal(store, 0, 1, [sample.id for sample in samples], 0)
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
    manifest = seal(store, 0, 2, [sample.id for sample in samples], 0)
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
    manifest = seal(store, 0, 1, [sample.id], 0)
    assert same_sample(read_samples(store, manifest, [sample.id])[0], sample)
    assert read_routes(store, manifest, [sample.id])[sample.id].sets_TLK.shape == (0, 3, 4)


@given(st.integers(0, 2**32), st.integers(2, 4), st.data())
def test_the_longest_equal_prompt_prefix_is_shared(seed, n, data):
    """Sharing ends at the first row that differs in sets or validity, and never leaves the prompt;
    the segments of each sample, joined, are its rows."""
    samples = make_samples(prompts=1, n=n, seed=seed)
    P = len(samples[0].prompt_tokens_P)
    routes = {s.id: s.routes for s in samples}
    shortest = min(P, *(len(r.valid_T) for r in routes.values()))
    differs = data.draw(st.integers(0, shortest))
    if differs < shortest:
        victim = data.draw(st.sampled_from(samples)).id
        sets, valid = routes[victim].sets_TLK.copy(), routes[victim].valid_T.copy()
        if data.draw(st.booleans()):
            valid[differs] = False
        else:
            id = next(i for i in range(16) if i not in sets[differs, 1])
            sets[differs, 1] = np.sort([id, *sets[differs, 1, 1:]])
        routes[victim] = Routes(sets, valid)
    made = cut(samples, routes)
    shared = [s for s in made.segments if s.owner == samples[0].group]
    assert sum(len(s.routes.valid_T) for s in shared) == differs
    for sample in samples:
        mine = [made.segments[row] for row in made.rows_of[sample.id]]
        assert [s.token_start for s in mine] == [0, differs][-len(mine) :]
        for name in ("sets_TLK", "valid_T"):
            joined = np.concatenate([getattr(s.routes, name) for s in mine])
            assert np.array_equal(joined, getattr(routes[sample.id], name))


def test_prompts_that_differ_are_not_shared():
    """Equal rows of different tokens are a coincidence."""
    one, two = make_samples(prompts=1, n=2)
    two = replace(two, prompt_tokens_P=one.prompt_tokens_P + 1)
    made = cut([one, two], {s.id: s.routes for s in (one, two)})
    assert [s.owner for s in made.segments] == [one.id, two.id]


class Counting:
    """A store that notes which bytes are read."""

    def __init__(self, store) -> None:
        self._store = store
        self.uri = store.uri
        self.ranges: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        self.ranges.append((key, offset, length))
        return self._store.read_range(key, offset, length)


def test_a_slice_fetches_its_own_bytes_alone(store, monkeypatch, small_row_groups):
    """Two neighbouring layers of one sample: of each of its row groups one range of the segments'
    columns, one of the two layers, and the footer. No byte of another layer or row group."""
    rng = np.random.default_rng(0)
    geometry = Geometry(64, 8, tuple(range(8)))
    samples = [
        replace(s, routes=Routes(random_sets(rng, len(s.tokens_S) - 1, geometry), s.routes.valid_T))
        for s in make_samples(prompts=6, n=2)
    ]
    write_shard(store, 0, 0, new_attempt(), samples, geometry, R3)
    manifest = seal(store, 0, 1, [s.id for s in samples], 0)
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
    groups = {int(np.searchsorted(firsts, s, "right")) - 1 for s in row["routes"][0]["segments"]}
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
    assert len(counting.ranges) <= 2 * len(groups) + 1


def test_row_groups_are_cut_by_tokens(store, small_row_groups):
    """A row group ends with the first segment that fills it."""
    sealed_r3(store, make_samples(prompts=6))
    for info in store.list("steps/000000/rollout/"):
        if info.key.endswith(".routes.parquet"):
            file = pq.ParquetFile(f"{store.uri.removeprefix('file://')}/{info.key}")
            for g in range(file.num_row_groups):
                tokens = file.read_row_group(g)["tokens"].to_pylist()
                assert sum(tokens[:-1]) < 10
                assert sum(tokens) >= 10 or g == file.num_row_groups - 1


def test_two_writers_of_one_shard(store):
    """The second one's commit is refused and shows the first one's; its files are debris that no
    manifest names; what is read is the first one's alone."""
    first, second = make_samples(seed=1), make_samples(seed=2)
    ours = write_shard(store, 0, 0, "aaaaaaaa", first, GEOMETRY, R3)
    theirs = write_shard(store, 0, 0, "bbbbbbbb", second, GEOMETRY, R3)
    assert ours.ours
    assert not theirs.ours
    assert theirs.body == ours.body
    manifest = seal(store, 0, 1, [s.id for s in first], 0)
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
    seal(store, 8, 1, [s.id for s in samples], 7)
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
