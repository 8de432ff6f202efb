"""Sealing: the join of the shards is complete, unique and of the plan's policy, or is refused."""

import itertools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.store import ObjectExistsError, ObjectMissingError, open_store
from pipeline.store.commit import content_digest, new_attempt
from pipeline.traces import (
    Geometry,
    Provenance,
    TraceError,
    VersionSpan,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    write_shard,
)
from pipeline.traces.ids import check_ids
from pipeline.traces.manifest import sealed_steps
from tests.unit.traces.make import (
    GEOMETRY,
    R3,
    by_shard,
    make_samples,
    planned_ids,
    sealed_r3,
    without_routes,
    write_shards,
)


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path))


ids = st.lists(st.sampled_from([f"000000/{row}/0" for row in range(12)]), max_size=14)


@given(ids, ids)
def test_a_join_is_good_only_if_it_is_exactly_the_plan(found, expected):
    """Any missing, unexpected or doubled id is named; nothing else is refused."""
    expected = sorted(set(expected))
    if sorted(found) == expected:
        check_ids("step 0", found, expected)
        return
    with pytest.raises(TraceError) as error:
        check_ids("step 0", found, expected)
    wrong = set(found) ^ set(expected) or {id for id in found if found.count(id) > 1}
    assert any(id in str(error.value) for id in wrong)


def test_a_missing_shard_is_not_sealed(store):
    samples = make_samples()
    write_shard(store, 0, 0, new_attempt(), samples, GEOMETRY, R3)
    with pytest.raises(ObjectMissingError, match=r"rollout/00001\.json"):
        seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0)
    assert store.size("steps/000000/manifest.json") is None


def test_samples_that_are_missing_doubled_or_foreign_are_named(store):
    """One sample missing, one of another shard, too: both in one error, and nothing is sealed."""
    samples = make_samples(prompts=4)
    write_shard(store, 0, 0, new_attempt(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, 1, new_attempt(), samples[3:6], GEOMETRY, R3)
    ids = [sample.id for sample in samples]
    with pytest.raises(TraceError) as error:
        seal(store, 0, 2, lambda shard: [ids[:4], [*ids[4:6], "000000/9/0"]][shard], 0)
    assert str(error.value) == (
        "step 0, shard 1: 3 samples, expected 3; missing: 000000/9/0; not expected: 000000/1/1"
    )
    assert store.size("steps/000000/manifest.json") is None


def test_another_policy_version_is_refused(store):
    """Even a few tokens of it, in the middle of a sample."""
    samples = make_samples()
    G = len(samples[2].response_tokens_G)
    stale = (VersionSpan(0, 0, G - 1), VersionSpan(1, G - 1, G))
    samples[2] = replace(samples[2], version_spans=stale)
    write_shards(store, samples)
    with pytest.raises(TraceError, match=r"policy versions \(0, 1\), its plan says 0"):
        seal(store, 0, 2, by_shard(planned_ids(), 2), 0)


@pytest.mark.parametrize(
    ("geometry", "provenance"),
    [
        (Geometry(17, 4, (1, 2, 5)), R3),
        (Geometry(16, 4, (1, 2, 6)), R3),
        (GEOMETRY, Provenance("R2", 0, R3.engine)),
        (GEOMETRY, Provenance("R3", 1, R3.engine)),
        (None, None),
    ],
)
def test_shards_must_agree(store, geometry, provenance):
    """Another number of experts, other layers, kind or policy version, or no routes at all."""
    samples = make_samples()
    second = samples[4:] if geometry else without_routes(samples[4:])
    write_shard(store, 0, 0, new_attempt(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, 1, new_attempt(), second, geometry, provenance)
    with pytest.raises(TraceError, match=r"rollout/00001\.json: .* but .*rollout/00000.json has"):
        seal(store, 0, 2, by_shard(planned_ids(), 2), 0)


def test_shards_of_two_engines_are_sealed(store):
    """A run goes on after its engine was upgraded, between two shards of a step."""
    samples = make_samples()
    upgraded = replace(R3, engine="vllm 0.33.0")
    write_shard(store, 0, 0, new_attempt(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, 1, new_attempt(), samples[4:], GEOMETRY, upgraded)
    assert (
        seal(store, 0, 2, lambda s: [planned_ids()[:4], planned_ids()[4:]][s], 0).head.provenance
        == R3
    )


def test_a_shard_in_another_ones_place_is_refused(store, tmp_path):
    write_shards(store, make_samples())
    rollout = tmp_path / "steps/000000/rollout"
    (rollout / "00001.json").write_bytes((rollout / "00000.json").read_bytes())
    with pytest.raises(TraceError, match=r"00001.json .* is the commit of .*'shard': 0"):
        seal(store, 0, 2, by_shard(planned_ids(), 2), 0)


def test_a_sealed_step_is_returned_as_it_stands(store):
    """Attaching seals nothing anew, even if a shard's commit is gone by then; but another plan's
    ids are noticed."""
    samples = make_samples()
    manifest = sealed_r3(store, samples)
    objects = [info.key for info in store.list("")]
    assert seal(store, 0, 2, by_shard(planned_ids(), 2), 0).all().rows.equals(manifest.rows)
    assert [info.key for info in store.list("")] == objects
    with pytest.raises(TraceError, match=r"manifest\.json.*not expected: 000000/2/0, 000000/2/1"):
        seal(store, 0, 2, by_shard(planned_ids(prompts=2), 2), 0)


class LosesAnswer:
    """A store whose creation of one object succeeds, but says that the object was there."""

    def __init__(self, store, key: str) -> None:
        self._store = store
        self._key = key
        self.uri = store.uri

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def create(self, key: str, data: bytes) -> None:
        self._store.create(key, data)
        if key == self._key:
            raise ObjectExistsError(f"create {key}: it exists already")


def test_a_lost_answer_is_no_failure(store):
    """The conditional create went through and its retry found the object there: the seal, and a
    shard's commit, are recognised as our own."""
    samples = make_samples()
    key = "steps/000000/rollout/00000.json"
    flaky = LosesAnswer(store, key)
    assert write_shard(flaky, 0, 0, new_attempt(), samples, GEOMETRY, R3).ours
    flaky = LosesAnswer(store, "steps/000000/manifest.json")
    manifest = seal(flaky, 0, 1, lambda _: planned_ids(), 0).all()
    assert manifest.ids == sorted(planned_ids())


def test_many_sealers_make_one_manifest(store):
    """Two flows at once: all see the same sealed step, whoever was first."""
    samples = make_samples()
    write_shards(store, samples)
    ids = by_shard(planned_ids(), 2)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: seal(store, 0, 2, ids, 0).all(), range(4)))
    assert all(m.rows.equals(made[0].rows) and m.files == made[0].files for m in made)
    assert read_manifest(store, 0).files == made[0].files


def test_a_sample_keeps_its_routes_whatever_shard_made_it(store, tmp_path):
    """The same samples cut into shards in two ways join to the same content."""
    samples = make_samples(prompts=4)
    other = open_store(str(tmp_path / "other"))
    one = sealed_r3(store, samples)
    write_shard(other, 0, 0, new_attempt(), samples[::-1], GEOMETRY, R3)
    two = seal(other, 0, 1, lambda _: planned_ids(prompts=4), 0).all()
    content = ["id", "token_digest", "routes_digest", "rows_valid", "reward"]
    assert one.rows.select(content).sort_by("id").equals(two.rows.select(content))
    for sample in samples:
        ours, theirs = read_routes(store, one, [sample.id]), read_routes(other, two, [sample.id])
        assert (ours[sample.id].sets_TLK == theirs[sample.id].sets_TLK).all()
    assert [s.id for s in read_samples(other, two, two.ids)] == two.ids


def test_sealed_steps(store):
    """Steps in the making are not among them."""
    sealed_r3(store, make_samples())
    samples = make_samples(step=12)
    write_shard(store, 12, 0, new_attempt(), samples, GEOMETRY, R3)
    assert sealed_steps(store) == [0]
    seal(store, 12, 1, lambda _: [s.id for s in samples], 0)
    assert sealed_steps(store) == [0, 12]
    with pytest.raises(ObjectMissingError, match=r"steps/000003/manifest\.json"):
        read_manifest(store, 3)


@pytest.fixture
def many(store, monkeypatch):
    """A sealed step of two shards, 24 samples and row groups of 5."""
    monkeypatch.setattr(sys.modules[seal.__module__], "ROW_GROUP_SAMPLES", 5)
    samples = make_samples(prompts=8, n=3)
    write_shards(store, samples)
    return seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 23), unique=True))
def test_some_rows_are_as_in_the_whole(many, rows):
    """Whatever rows are wanted, in their order; the head is the whole's."""
    whole, some = many.all(), many.select(rows)
    assert some.rows.equals(whole.rows.take(pa.array(rows, pa.int64())).combine_chunks())
    assert replace(some, rows=None) == replace(whole, rows=None)


def test_only_the_row_groups_of_wanted_rows_are_read(many):
    fetched = []

    class Noting:
        uri = many.store.uri

        def read_ranges(self, key, ranges):
            fetched.extend(ranges)
            return many.store.read_ranges(key, ranges)

    replace(many, store=Noting()).select([5, 9, 20])
    chunks = [chunk for g in (1, 4) for chunk in many.file.row_groups[g].chunks]
    assert set(fetched) == {(r.offset, r.length) for r in [*chunks, many.file.footer]}


def test_columns_come_alone_and_groups_as_codes(many):
    table = many.columns(["group", "rows_total"])
    assert table["rows_total"].to_pylist() == many.all().rows["rows_total"].to_pylist()
    assert pa.types.is_dictionary(table["group"].type)
    assert table["group"].to_pylist() == many.all().rows["group"].to_pylist()


def test_rows_that_there_are_not_are_refused(many):
    for rows in ([24], [-1, 3]):
        with pytest.raises(TraceError, match=r"step 0: rows .* of 24"):
            many.select(rows)


def test_a_groups_samples_are_neighbours(many):
    groups = many.all().rows["group"].to_pylist()
    assert len([1 for a, b in itertools.pairwise(groups) if a != b]) == len(set(groups)) - 1


def test_keys_that_a_later_version_adds_are_ignored(store, tmp_path):
    """At every level of a commit."""
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


def test_a_file_of_a_role_that_a_later_version_adds_is_passed_over(store, tmp_path):
    """Beside samples and routes, in a shard's commit; the shard is sealed and read without it."""
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
