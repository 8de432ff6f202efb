"""A step is sealed only if its shards are complete, contain no duplicates, and come from the plan's
policy version."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from pipeline.recorded import write_recorded_set
from pipeline.run import keys
from pipeline.run.commit import new_write_id
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
    write_shard,
)
from pipeline.traces.format.manifest import Rejected
from pipeline.upkeep.verify import verify
from tests.memory_store import MemoryStore
from tests.samples import (
    GEOMETRY,
    R3,
    by_shard,
    equal,
    make_samples,
    planned_ids,
    without_routes,
    write_shards,
)

MANIFEST = keys.manifest(0)


def test_missing_duplicated_and_unexpected_samples_are_named(store):
    """A sample is missing, and a sample of another shard is present. One error reports both
    problems, and the step is not sealed."""
    samples = make_samples(prompts=4)
    ids = [sample.id for sample in samples]

    def planned(shard):
        return [ids[:4], [*ids[4:6], "000000/9/0"]][shard]

    write_shard(store, 0, 0, new_write_id(), samples[:4], GEOMETRY, R3)
    with pytest.raises(ObjectMissingError, match=r"rollout/00001\.json"):
        seal(store, 0, 2, planned, 0)
    write_shard(store, 0, 1, new_write_id(), samples[3:6], GEOMETRY, R3)
    with pytest.raises(TraceError, match=r"shard 1: .*: 000000/9/0; .*: 000000/1/1"):
        seal(store, 0, 2, planned, 0)
    with pytest.raises(TraceError, match=f"duplicated: {ids[3]}"):
        seal(store, 0, 2, lambda shard: [ids[:4], ids[3:6]][shard], 0)
    assert store.size(MANIFEST) is None


def test_tokens_of_a_different_policy_version_are_refused(store):
    """Even a few such tokens in the middle of a sample are refused."""
    samples = make_samples()
    G = len(samples[2].response_tokens_G)
    stale = (VersionSpan(0, 0, G - 1), VersionSpan(1, G - 1, G))
    samples[2] = replace(samples[2], version_spans=stale)
    write_shards(store, samples)
    with pytest.raises(TraceError, match=r"policy versions \(0, 1\)"):
        seal(store, 0, 2, by_shard(planned_ids(), 2), 0)
    assert seal(store, 0, 2, by_shard(planned_ids(), 2), None).head.policy_versions == (0, 1)


@pytest.mark.parametrize(
    ("geometry", "provenance", "run"),
    [
        (Geometry(16, 4, (1, 2, 6)), R3, None),
        (GEOMETRY, Provenance("R2", 0, R3.engine), None),
        (None, None, None),
        (GEOMETRY, R3, "a" * 64),
    ],
)
def test_shards_must_agree(store, geometry, provenance, run):
    """One shard has different layers, a different kind, no routes, or belongs to another run. The
    engine may differ, because a run may continue after an upgrade."""
    samples = make_samples()
    second = samples[4:] if geometry else without_routes(samples[4:])
    write_shard(store, 0, 0, new_write_id(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, 1, new_write_id(), second, geometry, provenance, run=run)
    with pytest.raises(TraceError, match=r"rollout/00001\.json: .*rollout/00000\.json"):
        seal(store, 0, 2, lambda s: [planned_ids()[:4], planned_ids()[4:]][s], 0)


def test_shards_of_two_engines_are_sealed(store):
    """A run continues after its engine was upgraded between two shards of a step."""
    samples = make_samples()
    upgraded = replace(R3, engine="vllm 0.33.0")
    write_shard(store, 0, 0, new_write_id(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, 1, new_write_id(), samples[4:], GEOMETRY, upgraded)
    ids = planned_ids()
    assert seal(store, 0, 2, lambda s: [ids[:4], ids[4:]][s], 0).head.provenance == R3


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policy_version": 7}, "policy versions"),
        ({"training": True}, "training"),
        ({"shards": 3}, "number of shards"),
        ({"rejected": {}}, "rejected"),
        ({"rejected": {"000000/3": "too short"}}, "rejected"),
        ({"baselines": []}, "baselines"),
        ({"baselines": ["000000/1/1", "000000/2/1", "000000/3/1"]}, "baselines"),
    ],
)
def test_a_sealed_step_is_not_returned_to_a_seal_with_different_arguments(store, changes, says):
    """Otherwise, one of two racing sealers would believe that its arguments took effect. With the
    same arguments, the step is returned unchanged."""
    samples = make_samples(prompts=4)
    write_shards(store, samples)
    accepted = [sample.id for sample in samples if sample.group != "000000/3"]

    def planned(shard):
        return by_shard(accepted, 2)(shard) if shard < 2 else []

    arguments = {
        "shards": 2,
        "ids_of_shard": planned,
        "policy_version": 0,
        "rejected": {"000000/3": "too long"},
        "baselines": ["000000/1/1", "000000/3/1"],
    }
    sealed = seal(store, 0, **arguments)
    objects = [info.key for info in store.list("")]
    for version in (0, None, np.int64(0)):
        assert seal(store, 0, **{**arguments, "policy_version": version}).head == sealed.head
    with pytest.raises(TraceError, match=rf"manifest\.json in .*: sealed with .*{says}"):
        seal(store, 0, **{**arguments, **changes})
    with pytest.raises(TraceError, match=r"manifest\.json.*000000/2/0"):
        seal(store, 0, **{**arguments, "ids_of_shard": by_shard(accepted[:4], 2)})
    assert [info.key for info in store.list("")] == objects


class LosesAnswer(MemoryStore):
    """A store that creates each commit, but then reports that it existed."""

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        if key.endswith(".json"):
            raise ObjectExistsError(f"create {key}: the object already exists")


def test_a_lost_answer_is_not_a_failure():
    """The conditional create succeeded, but its answer was lost, so the retry found the object. The
    writer recognises the seal and the shard's commit as its own."""
    store = LosesAnswer()
    assert write_shard(store, 0, 0, new_write_id(), make_samples(), GEOMETRY, R3).ours
    assert seal(store, 0, 1, lambda _: planned_ids(), 0).all().ids == sorted(planned_ids())


def test_many_sealers_make_one_manifest(store):
    """Four sealers run at the same time, and all of them return the same sealed step."""
    write_shards(store, make_samples())
    ids = by_shard(planned_ids(), 2)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: seal(store, 0, 2, ids, 0).all(), range(4)))
    assert all(m.rows.equals(made[0].rows) and m.sha256 == made[0].sha256 for m in made)


REJECTED = {"000000/2": "all rewards are equal", "000000/0": "too long"}


def test_rejected_groups_are_in_the_shards_but_not_in_the_step(store, tmp_path):
    """The manifest lists their reasons and counts. Every reader of the step sees only the other
    groups."""
    samples = make_samples(prompts=4, n=3)
    kept = [sample for sample in samples if sample.group not in REJECTED]
    write_shards(store, samples)
    with pytest.raises(TraceError, match="missing: 000000/0/0"):
        seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0, rejected=REJECTED)
    ids = by_shard([s.id for s in kept], 2)
    manifest = seal(store, 0, 2, ids, 0, rejected=REJECTED).all()
    assert manifest.rejected == (
        Rejected("000000/0", "too long", 3),
        Rejected("000000/2", "all rewards are equal", 3),
    )
    assert sorted(manifest.ids) == [sample.id for sample in kept]
    routes = read_routes(store, manifest, manifest.ids)
    assert all(equal(routes[sample.id], sample.routes) for sample in kept)
    assert {sample.id for sample in read_samples(store, manifest, manifest.ids)} == set(routes)
    record = open_store(str(tmp_path / "set"))
    write_recorded_set(store, record, 0)
    assert read_manifest(record, 0).rejected == manifest.rejected
    assert not [*verify(store).problems, *verify(record).problems]


def test_a_rejected_group_counts_in_the_policy_versions_of_a_step(store):
    samples = make_samples(prompts=2)
    samples[2:] = [
        replace(s, version_spans=(VersionSpan(5, 0, len(s.response_tokens_G)),))
        for s in samples[2:]
    ]
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    ids = [sample.id for sample in samples[:2]]
    seal(store, 0, 1, lambda _: ids, None, rejected={"000000/1": "too long"})
    assert read_manifest(store, 0).policy_versions == (0, 5)


def test_samples_that_are_not_trained_on_are_marked(store):
    """One has no reward, one is a greedy baseline, and one is both."""
    samples = make_samples()
    for i in (1, 4):
        samples[i] = replace(samples[i], reward=None, reward_error="x")
    write_shards(store, samples)
    baselines = [samples[i].id for i in (3, 4)]
    ids = by_shard([s.id for s in samples], 2)
    rows = seal(store, 0, 2, ids, 0, baselines=baselines).all().rows.to_pylist()
    assert {row["id"]: row["not_trained"] for row in rows if row["not_trained"]} == {
        samples[1].id: "no reward",
        samples[3].id: "greedy baseline",
        samples[4].id: "greedy baseline",
    }


ALL_REJECTED = {"ids_of_shard": lambda _: [], "rejected": {"000000/0": "too long"}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training": 1}, "training"),
        ({"rejected": ["000000/0"]}, "rejected"),
        ({"rejected": {5: "x", "a": "y"}}, "rejected group"),
        ({"rejected": {"000000/0": "a\x1bb"}}, "reason"),
        ({"rejected": {"000000/7": "too long"}}, "rejected groups .*000000/7"),
        (ALL_REJECTED, "no samples"),
        ({"baselines": "000000/0/0"}, "baselines"),
        ({"baselines": [5]}, "baselines"),
        ({"baselines": ["000000/7/0"]}, "baselines .*000000/7/0"),
        ({"ids_of_shard": ["000000/0/0"]}, "ids_of_shard"),
        ({"ids_of_shard": lambda _: None}, "ids of shard 0"),
        ({"ids_of_shard": lambda _: [1]}, "ids of shard 0"),
    ],
)
def test_malformed_arguments_are_refused_before_the_step_is_sealed(store, changes, says):
    samples = make_samples(prompts=1)
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    arguments = {"ids_of_shard": lambda _: [s.id for s in samples], "policy_version": 0, **changes}
    with pytest.raises(TraceError, match=says):
        seal(store, 0, 1, **arguments)
    assert store.size(MANIFEST) is None


@pytest.mark.parametrize("beyond", [1, 7])
def test_a_step_is_not_sealed_without_its_last_shards(store, beyond):
    """A gap before the committed shard does not hide it."""
    samples = make_samples(prompts=4)
    write_shard(store, 0, 0, new_write_id(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, beyond, new_write_id(), samples[4:], GEOMETRY, R3)
    with pytest.raises(TraceError, match=rf"0000{beyond}\.json"):
        seal(store, 0, 1, lambda _: [sample.id for sample in samples[:4]], 0)
    assert store.size(MANIFEST) is None
