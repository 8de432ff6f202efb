"""A step is sealed only if its shards are complete, contain no duplicates, and come from the plan's
policy version."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pipeline import threads
from pipeline.run import keys
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
from pipeline.traces.write import seal as sealing
from pipeline.upkeep.verify import verify
from tests.patience import PATIENCE_S
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


def test_missing_duplicated_and_unexpected_samples_are_named(store):
    """A sample is missing, and a sample of another shard is present. One error reports both
    problems, and the step is not sealed."""
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


class Overlapping:
    """A store whose first `at_once` reads of each kind wait until all of them are under way.

    `most` is the largest number of simultaneous reads. A commit is one read of the kind `read`, and
    the columns of a shard are one read of the kind `read_ranges`.
    """

    def __init__(self, store, at_once):
        self._store, self.under_way, self.most = store, 0, 0
        self._lock = threading.Lock()
        self._together = {
            kind: (itertools.count(), threading.Barrier(at_once))
            for kind in ("read", "read_ranges")
        }

    def __getattr__(self, name):
        return getattr(self._store, name)

    def read(self, *arguments):
        return self._wait("read", *arguments)

    def read_ranges(self, *arguments):
        return self._wait("read_ranges", *arguments)

    def _wait(self, kind, *arguments):
        calls, barrier = self._together[kind]
        with self._lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            waits = next(calls) < barrier.parties
        try:
            if waits:
                barrier.wait(PATIENCE_S)
            return getattr(self._store, kind)(*arguments)
        finally:
            with self._lock:
                self.under_way -= 1


def many_shards(store):
    """Write a step of 40 shards with one sample each. Return the ids of each shard."""
    samples = make_samples(prompts=40)[::2]
    for shard, sample in enumerate(samples):
        write_shard(store, 0, shard, f"{shard:08x}", [sample], GEOMETRY, R3)
    return by_shard([sample.id for sample in samples], 40)


def test_the_reads_of_shards_overlap_and_the_step_is_the_same(tmp_path, monkeypatch):
    """The number of overlapping reads stays within the limit, and objects are equal byte for
    byte."""
    monkeypatch.setattr(sealing, "new_write_id", lambda: "0a1b2c3d")
    found = {}
    for at_once in (1, threads.AT_ONCE):
        plain = open_store(str(tmp_path / str(at_once)))
        ids, store = many_shards(plain), Overlapping(plain, at_once)
        with monkeypatch.context() as patched:
            patched.setattr(sealing, "in_order", partial(threads.in_order, at_once=at_once))
            seal(store, 0, 40, ids, 0)
        assert store.most == at_once
        found[at_once] = {info.key: plain.read(info.key) for info in plain.list("")}
    assert found[1] == found[threads.AT_ONCE]


def test_the_rows_of_a_shard_are_joined_only_when_a_row_group_is_written(store, monkeypatch):
    """Otherwise, sealing a step would take time quadratic in the number of its shards."""
    joined = []

    def counted(tables, *arguments, **options):
        tables = list(tables)
        joined.append(sum(table.column(0).num_chunks for table in tables))
        return join(tables, *arguments, **options)

    join = sealing.pa.concat_tables
    ids = many_shards(store)
    monkeypatch.setattr(sealing.pa, "concat_tables", counted)
    seal(store, 0, 40, ids, 0)
    assert 40 <= sum(joined) <= 3 * 40


def test_the_first_of_several_wrong_shards_is_named(store):
    """Shards are checked in order, whatever the order in which they are read: first all commits,
    then all columns."""
    ids = many_shards(store)
    wrong = {shard: [*ids(shard), f"000000/{shard}/9"] for shard in (7, 8, 30)}
    with pytest.raises(TraceError, match=r"step 0, shard 7: .* missing: 000000/7/9"):
        seal(store, 0, 40, lambda shard: wrong.get(shard, ids(shard)), 0)
    for shard in (31, 33):
        store.delete(keys.rollout(0, shard))
    with pytest.raises(ObjectMissingError, match=r"rollout/00031\.json"):
        seal(store, 0, 40, lambda shard: wrong.get(shard, ids(shard)), 0)
    assert store.size("steps/000000/manifest.json") is None


def test_tokens_of_a_different_policy_version_are_refused(store):
    """Even a few such tokens in the middle of a sample are refused."""
    samples = make_samples()
    G = len(samples[2].response_tokens_G)
    stale = (VersionSpan(0, 0, G - 1), VersionSpan(1, G - 1, G))
    samples[2] = replace(samples[2], version_spans=stale)
    write_shards(store, samples)
    with pytest.raises(TraceError, match=r"policy versions \(0, 1\), but the step's plan has 0"):
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
    """One shard has a different number of experts, different layers, a different kind or policy
    version, or no routes."""
    samples = make_samples()
    second = samples[4:] if geometry else without_routes(samples[4:])
    write_shard(store, 0, 0, new_write_id(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, 1, new_write_id(), second, geometry, provenance)
    with pytest.raises(
        TraceError, match=r"rollout/00001\.json: .*, expected .* as in .*rollout/00000\.json"
    ):
        seal(store, 0, 2, by_shard(planned_ids(), 2), 0)


def test_shards_of_two_engines_are_sealed(store):
    """A run continues after its engine was upgraded between two shards of a step."""
    samples = make_samples()
    upgraded = replace(R3, engine="vllm 0.33.0")
    write_shard(store, 0, 0, new_write_id(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, 1, new_write_id(), samples[4:], GEOMETRY, upgraded)
    assert (
        seal(store, 0, 2, lambda s: [planned_ids()[:4], planned_ids()[4:]][s], 0).head.provenance
        == R3
    )


def test_a_shard_under_the_key_of_another_shard_is_refused(store, tmp_path):
    write_shards(store, make_samples())
    rollout = tmp_path / "steps/000000/rollout"
    (rollout / "00001.json").write_bytes((rollout / "00000.json").read_bytes())
    with pytest.raises(TraceError, match=r"00001.json .* the commit of .*'shard': 0"):
        seal(store, 0, 2, by_shard(planned_ids(), 2), 0)


def test_a_sealed_step_is_returned_unchanged(store):
    """Attaching does not seal the step again, even if a shard's commit is missing by then. Ids from
    a different plan are refused."""
    samples = make_samples()
    manifest = sealed_r3(store, samples)
    objects = [info.key for info in store.list("")]
    assert seal(store, 0, 2, by_shard(planned_ids(), 2), 0).all().rows.equals(manifest.rows)
    assert [info.key for info in store.list("")] == objects
    with pytest.raises(TraceError, match=r"manifest\.json.*not expected: 000000/2/0, 000000/2/1"):
        seal(store, 0, 2, by_shard(planned_ids(prompts=2), 2), 0)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"policy_version": 7}, r"policy versions \(0,\), expected \(7,\); a sealed step never"),
        ({"training": True}, "training False, expected True"),
        ({"shards": 3}, "number of shards 2, expected 3"),
        ({"rejected": {}}, r"rejected {'000000/3': 'too long'}, expected {}"),
        (
            {"rejected": {"000000/3": "too short"}},
            r"rejected {'000000/3': 'too long'}, expected {'000000/3': 'too short'}",
        ),
        ({"baselines": []}, r"baselines \['000000/1/1'\], expected \[\]"),
        (
            {"baselines": ["000000/1/1", "000000/2/1", "000000/3/1"]},
            r"baselines \[\], expected \['000000/2/1'\]",
        ),
        ({"baselines": ["000000/1/1", "000000/7/0"]}, r"baselines \[\], expected \['000000/7/0'\]"),
    ],
)
def test_a_sealed_step_is_not_returned_to_a_seal_with_different_arguments(store, changes, says):
    """Otherwise, one of two racing sealers would believe that its arguments took effect."""
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
    assert seal(store, 0, **arguments).head == sealed.head
    for version in (None, np.int64(0)):
        assert seal(store, 0, **{**arguments, "policy_version": version}).head == sealed.head
    with pytest.raises(TraceError, match=rf"manifest\.json in .*: sealed with .*{says}"):
        seal(store, 0, **{**arguments, **changes})


class LosesAnswer:
    """A store that creates one object, but then reports that the object existed."""

    def __init__(self, store, key: str) -> None:
        self._store = store
        self._key = key
        self.uri = store.uri

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def create(self, key: str, data: bytes) -> None:
        self._store.create(key, data)
        if key == self._key:
            raise ObjectExistsError(f"create {key}: the object already exists")


def test_a_lost_answer_is_not_a_failure(store):
    """The conditional create succeeded, but its answer was lost, so the retry found the object. The
    writer recognises the seal and the shard's commit as its own."""
    samples = make_samples()
    key = "steps/000000/rollout/00000.json"
    flaky = LosesAnswer(store, key)
    assert write_shard(flaky, 0, 0, new_write_id(), samples, GEOMETRY, R3).ours
    flaky = LosesAnswer(store, "steps/000000/manifest.json")
    manifest = seal(flaky, 0, 1, lambda _: planned_ids(), 0).all()
    assert manifest.ids == sorted(planned_ids())


def test_many_sealers_make_one_manifest(store):
    """Four sealers run at the same time, and all of them return the same sealed step."""
    samples = make_samples()
    write_shards(store, samples)
    ids = by_shard(planned_ids(), 2)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: seal(store, 0, 2, ids, 0).all(), range(4)))
    assert all(m.rows.equals(made[0].rows) and m.files == made[0].files for m in made)
    assert read_manifest(store, 0).files == made[0].files


def test_the_seal_does_not_depend_on_the_division_into_shards(store, tmp_path):
    """The same samples, divided into shards in two ways, are sealed to the same content."""
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


def test_rejected_groups_are_in_the_shards_but_not_in_the_step(store):
    """The manifest lists their reasons and counts. Every reader of the step sees only the other
    groups."""
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


def test_a_recorded_set_keeps_rejected_groups(store, tmp_path):
    seal_without_rejected(store, make_samples(prompts=4, n=3))
    record = open_store(str(tmp_path / "set"))
    write_recorded_set(store, record, 0)
    assert read_manifest(record, 0).rejected == read_manifest(store, 0).rejected
    assert not verify(record).problems


def test_a_missing_or_malformed_rejected_group_is_refused(store):
    samples = make_samples()
    write_shards(store, samples)
    ids = by_shard([sample.id for sample in samples], 2)
    with pytest.raises(TraceError, match="rejected groups missing from all shards: 000000/7"):
        seal(store, 0, 2, ids, 0, rejected={"000000/7": "too long"})
    for wrong in ({"": "too long"}, {"000000/1": "a\x1bb"}, {"000000/1": None}, {3: "x"}):
        with pytest.raises(TraceError, match=r"step 0: (rejected|reason for rejecting) group"):
            seal(store, 0, 2, ids, 0, rejected=wrong)
    everything = {sample.group: "too long" for sample in samples}
    with pytest.raises(TraceError, match="no samples, expected at least one"):
        seal(store, 0, 2, lambda _: [], 0, rejected=everything)
    assert store.size("steps/000000/manifest.json") is None


def test_an_expected_sample_of_a_rejected_group_is_missing(store):
    samples = make_samples(prompts=4, n=3)
    write_shards(store, samples)
    with pytest.raises(TraceError, match="missing: 000000/0/0"):
        seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0, rejected=REJECTED)


def test_a_rejected_group_counts_in_the_policy_versions_of_a_step(store):
    """A manifest lists the versions of all samples in its shards, as `verify` requires."""
    samples = make_samples(prompts=2)
    later = VersionSpan(5, 0, 10**6)
    samples = [
        replace(s, version_spans=(replace(later, end=len(s.response_tokens_G)),))
        if s.group == "000000/1"
        else s
        for s in samples
    ]
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    ids = [sample.id for sample in samples if sample.group != "000000/1"]
    seal(store, 0, 1, lambda _: ids, None, rejected={"000000/1": "too long"})
    assert read_manifest(store, 0).policy_versions == (0, 5)
    assert not verify(store).problems


def test_a_sample_in_two_shards_is_refused(store):
    """Otherwise, no reader could open the sealed step."""
    samples = make_samples(prompts=2)
    for shard in range(2):
        write_shard(store, 0, shard, new_write_id(), samples[shard:], GEOMETRY, R3)
    with pytest.raises(TraceError, match=f"duplicated: {samples[1].id}"):
        seal(store, 0, 2, lambda shard: [s.id for s in samples[shard:]], 0)
    assert store.size("steps/000000/manifest.json") is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training": "yes"}, "training yes, expected a bool"),
        ({"training": 1}, "training 1, expected a bool"),
        ({"rejected": ["000000/1"]}, r"rejected \['000000/1'\], expected a mapping"),
        ({"rejected": {5: "x", "a": "y"}}, "rejected group: 5 of type int, expected text"),
        ({"baselines": "000000/0/0"}, "baselines: 000000/0/0, expected a list of texts"),
        ({"baselines": [5]}, "baselines: 5 of type int, expected text"),
        ({"baselines": None}, "baselines: None, expected a list of texts"),
        ({"baselines": ["000000/7/0"]}, "baselines missing from all shards: 000000/7/0"),
        ({"ids_of_shard": ["000000/0/0"]}, "ids_of_shard of type list, expected a function"),
        ({"ids_of_shard": None}, "ids_of_shard of type NoneType, expected a function"),
        ({"ids_of_shard": lambda _: None}, "ids of shard 0: None, expected a list of texts"),
        ({"ids_of_shard": lambda _: [1]}, "ids of shard 0: 1 of type int, expected text"),
        ({"ids_of_shard": lambda _: [["a"]]}, r"ids of shard 0: \['a'\] of type list"),
        ({"ids_of_shard": lambda _: "000000/0/0"}, "ids of shard 0: 000000/0/0, expected a list"),
    ],
)
def test_malformed_arguments_are_refused_before_the_step_is_sealed(store, changes, says):
    samples = make_samples(prompts=1)
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    arguments = {"ids_of_shard": lambda _: [s.id for s in samples], "policy_version": 0, **changes}
    with pytest.raises(TraceError, match=says):
        seal(store, 0, 1, **arguments)
    assert store.size("steps/000000/manifest.json") is None


def test_a_policy_version_may_be_a_numpy_integer(store):
    samples = make_samples(prompts=1)
    write_shard(store, 0, 0, new_write_id(), samples, GEOMETRY, R3)
    made = seal(store, 0, 1, lambda _: [s.id for s in samples], np.int64(0))
    assert made.head.policy_versions == (0,)


def test_equal_hashes_of_different_ids_do_not_refuse_a_step(store, monkeypatch):
    monkeypatch.setattr(sealing, "hash", lambda _: 7, raising=False)
    samples = make_samples(prompts=2)
    write_shards(store, samples)
    seal(store, 0, 2, by_shard([s.id for s in samples], 2), 0)
    assert len(read_manifest(store, 0).ids) == len(samples)


@pytest.mark.parametrize("beyond", [1, 7])
def test_a_step_is_not_sealed_without_its_last_shards(store, beyond):
    """A gap before the committed shard does not hide it."""
    samples = make_samples(prompts=4)
    write_shard(store, 0, 0, new_write_id(), samples[:4], GEOMETRY, R3)
    write_shard(store, 0, beyond, new_write_id(), samples[4:], GEOMETRY, R3)
    ids = [sample.id for sample in samples[:4]]
    with pytest.raises(TraceError, match=rf"0000{beyond}\.json in .*: this shard is committed too"):
        seal(store, 0, 1, lambda _: ids, 0)
    assert store.size(keys.manifest(0)) is None
