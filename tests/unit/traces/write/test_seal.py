"""Sealing: the join of the shards is complete, unique and of the plan's policy, or is refused."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from pipeline.run.commit import new_write_id
from pipeline.run.plan import publish_plan
from pipeline.store import ObjectExistsError, ObjectMissingError, open_store
from pipeline.traces import (
    Geometry,
    Provenance,
    TraceError,
    VersionSpan,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    write_recorded_set,
    write_shard,
)
from pipeline.traces.format.manifest import Rejected
from pipeline.upkeep.verify import verify
from tests.samples import (
    GEOMETRY,
    R3,
    by_shard,
    equal,
    make_plan,
    make_samples,
    planned_ids,
    sealed_r3,
    without_routes,
    write_shards,
)


def test_a_missing_shard_is_not_sealed(store):
    samples = make_samples()
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    with pytest.raises(ObjectMissingError, match=r"rollout/00001\.json"):
        seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0)
    assert store.size("steps/000000/manifest.json") is None


def test_samples_that_are_missing_doubled_or_foreign_are_named(store):
    """One sample missing, one of another shard, too: both in one error, and nothing is sealed."""
    samples = make_samples(prompts=4)
    write_shard(store, 0, 0, new_write_id(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, 1, new_write_id(), samples[3:6], GEOMETRY, R3)
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
    write_shard(store, 0, 0, new_write_id(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, 1, new_write_id(), second, geometry, provenance)
    with pytest.raises(TraceError, match=r"rollout/00001\.json: .* but .*rollout/00000.json has"):
        seal(store, 0, 2, by_shard(planned_ids(), 2), 0)


def test_shards_of_two_engines_are_sealed(store):
    """A run goes on after its engine was upgraded, between two shards of a step."""
    samples = make_samples()
    upgraded = replace(R3, engine="vllm 0.33.0")
    write_shard(store, 0, 0, new_write_id(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, 1, new_write_id(), samples[4:], GEOMETRY, upgraded)
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
    assert write_shard(flaky, 0, 0, new_write_id(), samples, GEOMETRY, R3).ours
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
    write_shard(other, 0, 0, new_write_id(), samples[::-1], GEOMETRY, R3)
    two = seal(other, 0, 1, lambda _: planned_ids(prompts=4), 0).all()
    content = ["id", "token_digest", "routes_digest", "rows_valid", "reward"]
    assert one.rows.select(content).sort_by("id").equals(two.rows.select(content))
    for sample in samples:
        ours, theirs = read_routes(store, one, [sample.id]), read_routes(other, two, [sample.id])
        assert (ours[sample.id].sets_TLK == theirs[sample.id].sets_TLK).all()
    assert [s.id for s in read_samples(other, two, two.ids)] == two.ids


REJECTED = {"000000/2": "all rewards are equal", "000000/0": "too long"}


def kept(samples):
    return [sample for sample in samples if sample.group not in REJECTED]


def seal_without_rejected(store, samples):
    write_shards(store, samples)
    ids = [sample.id for sample in kept(samples)]
    return seal(store, 0, 2, by_shard(ids, 2), 0, rejected=REJECTED)


def test_rejected_groups_are_in_the_shards_and_not_in_the_step(store):
    """With their reasons and counts; everything that reads the step sees the others alone."""
    samples = make_samples(prompts=4, n=3)
    manifest = seal_without_rejected(store, samples).all()
    assert manifest.rejected == (
        Rejected("000000/0", "too long", 3),
        Rejected("000000/2", "all rewards are equal", 3),
    )
    assert sorted(manifest.ids) == [sample.id for sample in kept(samples)]
    routes = read_routes(store, manifest, manifest.ids)
    for sample in kept(samples):
        assert equal(routes[sample.id], sample.routes)
    assert {sample.id for sample in read_samples(store, manifest, manifest.ids)} == set(routes)
    assert not verify(store).problems
    publish_plan(store, make_plan(prompts=4, n=3))
    assert not verify(store).problems


def test_a_set_of_such_a_step_keeps_what_was_rejected(store, tmp_path):
    seal_without_rejected(store, make_samples(prompts=4, n=3))
    record = open_store(str(tmp_path / "set"))
    write_recorded_set(store, record, 0)
    assert read_manifest(record, 0).rejected == read_manifest(store, 0).rejected
    assert not verify(record).problems


def test_a_rejected_group_that_is_nowhere_or_of_no_name_is_refused(store):
    samples = make_samples()
    write_shards(store, samples)
    ids = by_shard([sample.id for sample in samples], 2)
    with pytest.raises(TraceError, match="rejected groups that no shard has: 000000/7"):
        seal(store, 0, 2, ids, 0, rejected={"000000/7": "too long"})
    for wrong in ({"": "too long"}, {"000000/1": "a\x1bb"}, {"000000/1": None}, {3: "x"}):
        with pytest.raises(TraceError, match=r"step 0: .*rejected group"):
            seal(store, 0, 2, ids, 0, rejected=wrong)
    everything = {sample.group: "too long" for sample in samples}
    with pytest.raises(TraceError, match="no samples, expected at least one"):
        seal(store, 0, 2, lambda _: [], 0, rejected=everything)
    assert store.size("steps/000000/manifest.json") is None


def test_a_rejected_sample_among_the_expected_ones_is_missing(store):
    samples = make_samples(prompts=4, n=3)
    write_shards(store, samples)
    with pytest.raises(TraceError, match="missing: 000000/0/0"):
        seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0, rejected=REJECTED)
