"""The trainer's routes must be complete and belong to their step, or they are refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from pipeline.cli import traces
from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.run.plan import publish_plan
from pipeline.store import ObjectExistsError, ObjectMissingError, Store, StoreError, open_store
from pipeline.traces import (
    NewTrainingSet,
    Routes,
    TraceError,
    read_manifest,
    read_routes,
    routes_digest,
    seal,
    seal_training_set,
    used_routes,
    write_recorded_set,
    write_shard,
    write_training_routes,
)
from pipeline.upkeep.verify import verify
from tests.forged_sets import name_all, put_signed, resign, training_commits
from tests.memory_store import MemoryStore
from tests.samples import (
    GEOMETRY,
    R2,
    STAGES,
    equal,
    make_plan,
    make_samples,
    random_sets,
    sealed_r2,
    sealed_r3,
    train,
    without_routes,
    write_run,
    write_stage,
)

SAMPLES = make_samples()


def trained_run(store: Store, samples=SAMPLES) -> None:
    """Write a finished R2 step."""
    write_run(store, samples, "R2")
    publish_plan(store, make_plan())
    sealed_r2(store, samples)
    commit(store, keys.metrics(0), {"step": 0, "metrics": {}}, "a")


def other_routes(samples=SAMPLES, seed: int = 1):
    """Return samples with the same ids, tokens and lengths, but different routes."""
    rng = np.random.default_rng(seed)
    return [
        replace(
            s, routes=Routes(random_sets(rng, len(s.routes.valid_T), GEOMETRY), s.routes.valid_T)
        )
        for s in samples
    ]


def other_tokens(samples=SAMPLES):
    return [
        replace(s, response_tokens_G=(s.response_tokens_G + 1).astype(np.uint32)) for s in samples
    ]


@pytest.fixture
def store():
    made = MemoryStore()
    trained_run(made)
    return made


@pytest.fixture
def other():
    """Another run with the same ids and lengths."""
    made = MemoryStore()
    trained_run(made, other_tokens(other_routes()))
    return made


def take(store: Store, source: Store, *parts: str) -> None:
    """Replace the store's training objects with those of another run."""
    for part in parts:
        for info in list(store.list(keys.step_prefix(0))):
            if info.key.startswith(keys.step_prefix(0) + part):
                store.delete(info.key)
        for info in list(source.list(keys.step_prefix(0))):
            if info.key.startswith(keys.step_prefix(0) + part):
                store.create(info.key, source.read(info.key))


def read_used(store: Store, layers: tuple[int, ...] | None = None) -> dict[str, Routes]:
    used = used_routes(store, 0)
    return read_routes(store, used, used.ids, layers)


def assert_refused(store: Store, says: str, verify_says: str | None = None) -> None:
    """Check that the reader, the code that depends on the reader, and verify refuse the step."""
    with pytest.raises((TraceError, StoreError), match=says):
        read_used(store)
    with pytest.raises((TraceError, StoreError), match=says):
        write_recorded_set(store, MemoryStore(), 0)
    problems = verify(store).problems
    assert problems
    assert any(re.search(verify_says or says, str(problem)) for problem in problems), problems


def test_the_routes_of_the_trainer_are_read(store):
    used = used_routes(store, 0)
    found = read_routes(store, used, used.ids)
    assert all(equal(found[s.id], s.routes) for s in SAMPLES)
    assert used.rows["rows_valid"].to_pylist() == [int(s.routes.valid_T.sum()) for s in SAMPLES]
    assert verify(store).problems == []


class TestFromAnotherRun:
    """No digest was recomputed, because every object is intact."""

    def test_all_objects(self, store, other):
        take(store, other, "training")
        assert_refused(store, "belongs to a different run")

    def test_the_folder_without_training_json(self, store, other):
        take(store, other, "training/")
        assert_refused(store, "no such object")

    @pytest.mark.parametrize("stage", [0, 1])
    def test_one_stage(self, store, other, stage):
        """The other run's commits have the keys of the store's commits."""
        ours = [key for key in training_commits(store) if f"/00{stage}-" in key]
        theirs = [key for key in training_commits(other) if f"/00{stage}-" in key]
        for mine, foreign in zip(ours, theirs, strict=True):
            file = json.loads(other.read(foreign))["files"][0]["key"]
            store.create(file, other.read(file))
            store.delete(mine)
            store.create(mine, other.read(foreign))
        assert_refused(store, "belongs to a different run", "training.json records other content")

    def test_a_stage_whose_digests_were_remade(self, store, other):
        """The forger put the digest of this step's manifest into the commits and named these in
        training.json, but did not recompute the token digests."""
        sealed = read_manifest(store, 0)
        take(store, other, "training")
        for key in training_commits(store):
            resign(store, key, manifest_sha256=sealed.sha256)
        name_all(store, NewTrainingSet(sealed, R2))
        assert_refused(store, r"has token digest .* belongs to a different run")

    def test_more_valid_rows_than_rows(self, store, other):
        """The forger signed the changed commits and named them in training.json (level L1 of
        tests/hostile)."""
        sealed = read_manifest(store, 0)
        for key in training_commits(store):
            digests = json.loads(store.read(key))["digests"]
            digests[0][4] = 2**31
            resign(store, key, digests=digests)
        name_all(store, NewTrainingSet(sealed, R2))
        assert_refused(store, r"2147483648 valid rows, but its file contains \d+ rows")


class TestMissing:
    def test_the_set(self, store):
        for info in list(store.list(keys.step_prefix(0) + "training")):
            store.delete(info.key)
        assert_refused(store, "no such object")

    def test_training_json(self, store):
        store.delete(keys.training_set(0))
        assert_refused(store, "no such object")

    def test_a_stage(self, store):
        for key in training_commits(store):
            if "/001-" in key:
                store.delete(key)
        assert_refused(store, "no such object")

    def test_a_stage_that_is_not_named(self, store):
        """The forger wrote a training.json for a model with fewer layers (level L1 of
        tests/hostile)."""
        sealed = read_manifest(store, 0)
        for key in training_commits(store):
            if "/001-" in key:
                store.delete(key)
        name_all(store, NewTrainingSet(sealed, R2))
        assert_refused(store, r"layers \[1, 2\], expected \[1, 2, 5\]")

    def test_an_export_of_a_step_without_a_stage_fails(self, tmp_path):
        store = open_store(str(tmp_path / "run"))
        trained_run(store)
        for key in training_commits(store):
            if "/001-" in key:
                store.delete(key)
        out = tmp_path / "out"
        done = CliRunner().invoke(traces.app, ["export", store.uri, "--out", str(out)])
        assert done.exit_code != 0
        assert "001-00000" in done.output
        assert not list(out.rglob("*.npy"))


def test_a_step_during_training_is_valid_and_has_no_routes_yet():
    """While the run continues, the step is sealed but its routes are not recorded."""
    store = MemoryStore()
    write_run(store, SAMPLES, "R2")
    publish_plan(store, make_plan())
    write_shard(store, 0, 0, new_write_id(), without_routes(SAMPLES), None, None)
    seal(store, 0, 1, lambda _: [s.id for s in SAMPLES], 0, training=True)
    assert verify(store).problems == []
    with pytest.raises(TraceError, match="not recorded yet, or were removed"):
        used_routes(store, 0)
    new = NewTrainingSet(read_manifest(store, 0), R2)
    write_stage(store, new, 0, 0, STAGES[0][1], SAMPLES)
    assert verify(store).problems == [], "a part of an unfinished set"
    with pytest.raises(TraceError, match="not recorded yet, or were removed"):
        used_routes(store, 0)


@pytest.mark.parametrize("later", ["policy", "metrics"])
def test_a_trained_step_must_have_its_routes(later):
    store = MemoryStore()
    write_run(store, SAMPLES, "R2")
    publish_plan(store, make_plan())
    write_shard(store, 0, 0, new_write_id(), without_routes(SAMPLES), None, None)
    seal(store, 0, 1, lambda _: [s.id for s in SAMPLES], 0, training=True)
    key = {"policy": keys.policy(1), "metrics": keys.metrics(0)}[later]
    commit(store, key, {"step": 0, "metrics": {}, "files": [], "version": 1}, "a")
    problems = [str(problem) for problem in verify(store).problems]
    assert any(f"{keys.training_set(0)}: no such object" in problem for problem in problems)


def test_a_set_in_a_step_without_recorded_routes_is_refused(other):
    store = MemoryStore()
    sealed_r3(store, SAMPLES)
    take(store, other, "training")
    assert_refused(store, "the trainer records no routes")


def flipped(routes: Routes) -> Routes:
    """Return routes with one expert of one valid row changed."""
    sets = routes.sets_TLK.copy()
    t = int(np.flatnonzero(routes.valid_T)[-1])
    unused = np.setdiff1d(np.arange(GEOMETRY.experts), sets[t, 0])
    sets[t, 0, 0] = unused[0]
    sets[t, 0].sort()
    return Routes(sets, routes.valid_T)


CHANGED = {
    "zeroed": lambda routes: Routes(np.zeros_like(routes.sets_TLK) + np.arange(4), routes.valid_T),
    "swapped": lambda routes: Routes(routes.sets_TLK[:, ::-1].copy(), routes.valid_T),
    "flipped": flipped,
    "less known": lambda routes: Routes(routes.sets_TLK, np.zeros_like(routes.valid_T)),
}


@pytest.mark.parametrize("change", CHANGED)
def test_changed_rows_whose_files_and_commits_were_remade_are_refused(change):
    """The file, its ranges, the commit and training.json match the changed rows, but the per-sample
    digests are those of the recorded rows (level L1 of tests/hostile)."""
    store = MemoryStore()
    trained_run(store)
    changed = [replace(s, routes=CHANGED[change](s.routes)) for s in SAMPLES]
    sealed = read_manifest(store, 0)
    before = {key: json.loads(store.read(key)) for key in training_commits(store)}
    for info in list(store.list(keys.trainings(0))):
        store.delete(info.key)
    new = NewTrainingSet(sealed, R2)
    for stage, layers in STAGES:
        for dp_rank in range(2):
            write_stage(store, new, stage, dp_rank, layers, changed[dp_rank::2])
    for key, old in zip(training_commits(store), before.values(), strict=True):
        resign(store, key, digests=old["digests"])
    name_all(store, new)
    whole_parts = [None, (2, 1)] if change == "flipped" else [None, (2, 1), (5,)]
    for layers in whole_parts:  # a stage is compared even if no other stage is read
        with pytest.raises(TraceError, match=r"have digest|valid rows, but"):
            read_used(store, layers)
    says = "valid rows, but" if change == "less known" else "have digest"
    assert any(says in str(problem) for problem in verify(store).problems)


def test_a_set_is_sealed_only_if_it_has_every_sample_in_every_layer(store):
    sealed = read_manifest(store, 0)
    for info in list(store.list(keys.step_prefix(0) + "training")):
        store.delete(info.key)
    new = NewTrainingSet(sealed, R2)
    for samples, layers, says in (
        (None, None, "no commits"),
        (SAMPLES, (1, 2), r"for layers \[1, 2\], expected \[1, 2, 5\]"),
        (SAMPLES[1:], (5,), "position 0 rows of routes|0 rows of routes, expected"),
    ):
        if samples:
            write_stage(store, new, layers[0], 0, layers, samples)
        with pytest.raises(TraceError, match=says):
            seal_training_set(store, new, GEOMETRY)
    write_stage(store, new, 5, 1, (5,), SAMPLES[:1])
    assert seal_training_set(store, new, GEOMETRY).ours
    assert verify(store).problems == []


def test_a_step_has_one_set_and_the_first_stays(store):
    """A restart with a different layout uses the step's set and writes no other set. Debris from
    a dead attempt is ignored."""
    before = store.read(keys.training_set(0))
    new = NewTrainingSet(read_manifest(store, 0), R2)
    write_stage(store, new, 0, 0, GEOMETRY.layers, other_routes())
    assert not seal_training_set(store, new, GEOMETRY).ours
    assert store.read(keys.training_set(0)) == before
    used = used_routes(store, 0)
    assert all(equal(read_routes(store, used, [s.id])[s.id], s.routes) for s in SAMPLES)
    assert verify(store).problems == []


def test_a_set_of_another_manifest_is_not_sealed(store):
    new = NewTrainingSet(replace(read_manifest(store, 0), sha256="0" * 64), R2)
    with pytest.raises(TraceError, match=r"content .*, expected 0000.* as in the training set"):
        seal_training_set(store, new, GEOMETRY)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"step": 1}, "step 1, expected 0"),
        ({"manifest_sha256": "0" * 64}, "belongs to a different run"),
        ({"manifest_sha256": ...}, "belongs to a different run"),
        ({"commits": ...}, "the field 'commits' is missing"),
        ({"commits": []}, "0 commits"),
        (
            {"commits": [{"key": "steps/000000/training/x.json"}]},
            "commits: item 0: the field 'commit_sha256' is missing",
        ),
        ({"counts": {"samples": 6, "rows_total": 1, "rows_valid": 1}}, "counts"),
        ({"geometry": None}, "geometry null"),
        ({"geometry": {"experts": 16, "topk": 4, "layers": [1, 2]}}, "expected"),
        (
            {"geometry": {"experts": 32, "topk": 4, "layers": [1, 2, 5]}},
            r'\{"experts": 32, "topk": 4',
        ),
        ({"provenance": None}, "provenance null"),
        ({"provenance": {"kind": "R3", "policy_version": 0, "engine": "x"}}, "kind R3"),
        (
            {"provenance": {"kind": "R2", "policy_version": 9, "engine": "x"}},
            "kind R2 and policy version 0, expected kind R2 and policy version 9",
        ),
        (
            {"provenance": {"kind": "R2", "policy_version": 0, "engine": "other 9"}},
            "engine is other 9, but its commits have megatron-core",
        ),
        (
            {"policies": [{"version": 0, "weights_sha256": "c" * 64}]},
            r'policies \[\{"version": 0, "weights_sha256": "ccc.*, but its commits have null',
        ),
    ],
)
def test_a_set_with_wrong_values_is_refused(store, changes, says):
    resign(store, keys.training_set(0), **changes)
    if "counts" in changes:  # the rows are correct
        assert any(says in str(problem) for problem in verify(store).problems)
    else:
        assert_refused(store, says)


@pytest.mark.parametrize("known", [[0], [0, 1, 2, 3]], ids=["of one part", "of all parts"])
def test_policies_of_a_set_are_those_of_all_parts_together(store, known):
    """If the policies of one part are unknown, so are those of the set."""
    policies = [{"version": 0, "weights_sha256": "c" * 64}]
    for number in known:
        resign(store, training_commits(store)[number], policies=policies)
    right, wrong = (None, policies) if len(known) == 1 else (policies, None)
    store.delete(keys.training_set(0))
    name_all(store, NewTrainingSet(read_manifest(store, 0), R2), policies=right)
    assert used_routes(store, 0).policies is None  # those of the samples are unknown
    assert verify(store).problems == []
    resign(store, keys.training_set(0), policies=wrong)
    assert_refused(store, "but its commits have")


def of_first(**changes):
    """Return a change to the first digests of a commit: id, tokens, routes, rows, rows_valid."""

    def change(digests):
        names = ("id", "tokens", "routes", "rows", "rows_valid")
        first = dict(zip(names, digests[0], strict=True)) | changes
        return [list(first.values()), *digests[1:]]

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda digests: digests[1:], "digests for"),
        (lambda digests: [*digests, digests[0]], "digests for"),
        (lambda digests: [[*digests[0], 1], *digests[1:]], "digests: item 0: 6 values, expected 5"),
        (lambda digests: "x", "digests: 'x' is not a list"),
        (of_first(tokens="0" * 64), "has token digest"),
        (of_first(routes="0" * 64), "have digest"),
        (of_first(rows=1000), "1000"),
        (of_first(rows_valid=-1), "digests: item 0: -1 is not a count"),
        (of_first(id="000000/9/9"), "000000/9/9|a segment of 000000/0/0, expected one of"),
    ],
)
def test_a_commit_with_wrong_values_of_its_samples_is_refused(store, change, says):
    key = training_commits(store)[0]
    resign(store, key, digests=change(json.loads(store.read(key))["digests"]))
    sealed = NewTrainingSet(read_manifest(store, 0), R2)
    store.delete(keys.training_set(0))
    name_all(store, sealed)
    assert_refused(store, says)


def test_a_recorded_set_of_a_trained_step_has_the_digest_of_every_part(store):
    target = MemoryStore()
    write_recorded_set(store, target, 0)
    copy = read_manifest(target, 0)
    assert copy.training is False
    assert target.size(keys.training_set(0)) is None
    parts = dict(zip(copy.ids, copy.rows["part_digests"].to_pylist(), strict=True))
    for sample in SAMPLES:
        expected = [
            routes_digest(
                Routes(sample.routes.sets_TLK[:, columns], sample.routes.valid_T),
                Geometry(16, 4, layers),
            )
            for columns, (_, layers) in zip(([0, 1], [2]), STAGES, strict=True)
        ]
        assert parts[sample.id] == expected
    assert copy.rows["routes_digest"].to_pylist() == [
        routes_digest(sample.routes, GEOMETRY) for sample in SAMPLES
    ]
    assert verify(target).problems == []


@pytest.mark.parametrize("cp_ranks", [1, 2, 3])
def test_rows_cut_by_context_parallel_ranks_are_written_sealed_and_read(cp_ranks):
    """The rows are split in a zigzag, as for context-parallel ranks. If a sample is short, some
    ranks have none of its rows."""
    store = MemoryStore()
    write_shard(store, 0, 0, new_write_id(), without_routes(SAMPLES), None, None)
    seal(store, 0, 1, lambda _: [s.id for s in SAMPLES], 0, training=True)
    new = NewTrainingSet(read_manifest(store, 0), R2)
    for stage, layers in STAGES:
        columns = [GEOMETRY.layers.index(layer) for layer in layers]
        for cp_rank in range(cp_ranks):
            routes, positions = {}, {}
            for sample in SAMPLES:
                chunks = np.array_split(np.arange(len(sample.routes.valid_T)), 2 * cp_ranks)
                at = np.concatenate([chunks[cp_rank], chunks[-1 - cp_rank]])
                sets = sample.routes.sets_TLK[at][:, columns]
                routes[sample.id] = Routes(sets, sample.routes.valid_T[at])
                positions[sample.id] = at
            one = Geometry(16, 4, layers)
            write_training_routes(
                store, new, stage, 0, routes, one, cp_rank=cp_rank, positions=positions
            )
    assert seal_training_set(store, new, GEOMETRY).ours
    used = used_routes(store, 0)
    for layers in (None, (5,), (2, 1)):
        found = read_routes(store, used, used.ids, layers)
        columns = [GEOMETRY.layers.index(layer) for layer in layers or GEOMETRY.layers]
        for sample in SAMPLES:
            valid_T = sample.routes.valid_T
            expected = Routes(sample.routes.sets_TLK[:, columns], valid_T)
            assert equal(found[sample.id], expected)
    assert verify(store).problems == []
    target = MemoryStore()
    write_recorded_set(store, target, 0)
    assert verify(target).problems == []
    assert read_manifest(target, 0).rows["routes_digest"].to_pylist() == [
        routes_digest(sample.routes, GEOMETRY) for sample in SAMPLES
    ]


@pytest.mark.parametrize("positions", [[0, 0], [1, 0], [0, 99], [-1, 0]])
def test_invalid_positions_are_refused_before_the_commit(store, positions):
    new = NewTrainingSet(read_manifest(store, 0), R2)
    id = SAMPLES[0].id
    routes = {id: Routes(SAMPLES[0].routes.sets_TLK[:2], np.ones(2, bool))}
    with pytest.raises(TraceError, match=f"sample {id}: positions"):
        write_training_routes(
            store, new, 0, 0, routes, GEOMETRY, positions={id: np.array(positions)}
        )


def test_no_set_is_written_for_a_step_without_recorded_routes():
    store = MemoryStore()
    sealed = sealed_r3(store, SAMPLES)
    with pytest.raises(TraceError, match="the trainer records no routes for this step"):
        NewTrainingSet(sealed, R2)
    with pytest.raises(TraceError, match="routes of kind R3, expected R2"):
        NewTrainingSet(replace(sealed, training=True), replace(R2, kind="R3"))


def test_a_rank_that_repeats_its_part_needs_a_new_set(store):
    """After an interruption between its file and its commit, no rank can use the set's id again."""
    new = NewTrainingSet(read_manifest(store, 0), R2)
    routes = {sample.id: sample.routes for sample in SAMPLES}
    write_training_routes(store, new, 0, 0, routes, GEOMETRY)
    store.delete(keys.training(0, 0, 0, new.id))
    with pytest.raises(ObjectExistsError, match=r"under a new one .*all ranks write the set again"):
        write_training_routes(store, new, 0, 0, routes, GEOMETRY)


def test_missing_commits_are_reported(store):
    for key in training_commits(store):
        store.delete(key)
    with pytest.raises(ObjectMissingError, match="training/000-00000"):
        used_routes(store, 0)


def test_a_signed_object_under_another_key_is_refused(store):
    """The commit of one part is stored under the key of another."""
    first, second, *_ = training_commits(store)
    put_signed(store, second, json.loads(store.read(first)))
    name_all(store, NewTrainingSet(read_manifest(store, 0), R2))
    assert_refused(store, "position 0 is duplicated|0 rows of routes", "it names .*, expected")


def test_an_audit_contains_the_routes_of_trainer_and_engine(tmp_path):
    store = open_store(str(tmp_path))
    sealed_r3(store, SAMPLES, training=True)
    theirs = other_routes()
    train(store, theirs)
    used = used_routes(store, 0)
    found = read_routes(store, used, used.ids)
    assert all(equal(found[s.id], s.routes) for s in theirs)
    engine = read_routes(store, read_manifest(store, 0), used.ids)
    assert all(equal(engine[s.id], s.routes) for s in SAMPLES)


def test_a_set_or_part_in_format_1_0_is_refused(store):
    """A commit of format 1.0 has no digests, so its routes would be read without a check."""
    part = training_commits(store)[-1]
    body = resign(store, part, format="1.0", digests=..., samples=...)
    key = keys.training_set(0)
    commits = json.loads(store.read(key))["commits"]
    commits[-1]["commit_sha256"] = body["content_sha256"]
    resign(store, key, commits=commits)
    assert_refused(store, f"{part} in .*: format 1.0, expected 1.1 or later", "it names")
    resign(store, key, format="1.0")
    assert_refused(store, f"{key} in .*: format 1.0, expected 1.1 or later", "it names")


@pytest.mark.parametrize("number", range(4))
def test_a_wrong_number_of_valid_rows_is_refused_in_every_part(store, number):
    key = training_commits(store)[number]
    digests = json.loads(store.read(key))["digests"]
    digests[0][4] -= 1
    body = resign(store, key, digests=digests)
    commits = json.loads(store.read(keys.training_set(0)))["commits"]
    commits[number]["commit_sha256"] = body["content_sha256"]
    resign(store, keys.training_set(0), commits=commits)
    assert_refused(store, rf"sample {digests[0][0]}: \d+ valid rows, but {key} records \d+")


def test_stages_with_different_valid_rows_are_not_sealed():
    """The number of valid rows is the same in both stages."""
    store = MemoryStore()
    write_shard(store, 0, 0, "0123abcd", without_routes(SAMPLES), None, None)
    seal(store, 0, 1, lambda _: [sample.id for sample in SAMPLES], 0, training=True)
    new = NewTrainingSet(read_manifest(store, 0), R2)
    for stage, layers in STAGES:
        marked = []
        for sample in SAMPLES:
            valid_T = np.ones(len(sample.routes.valid_T), bool)
            valid_T[stage] = False
            marked.append(replace(sample, routes=Routes(sample.routes.sets_TLK, valid_T)))
        write_stage(store, new, stage, 0, layers, marked)
    with pytest.raises(TraceError, match=r"sample .*: its valid rows differ between layers"):
        seal_training_set(store, new, GEOMETRY)
    assert store.size(keys.training_set(0)) is None


@pytest.mark.parametrize(
    ("positions", "says"),
    [([], None), ([0.0, 1.0], "positions of type float64, expected integers")],
)
def test_positions_of_a_context_parallel_rank_must_be_integers(store, positions, says):
    sample = SAMPLES[0]
    n = len(positions)
    routes = Routes(sample.routes.sets_TLK[:n], sample.routes.valid_T[:n])
    new = NewTrainingSet(read_manifest(store, 0), R2)
    given = ({sample.id: routes}, GEOMETRY)
    at = {sample.id: np.array(positions)}
    if says is None:
        assert write_training_routes(store, new, 0, 0, *given, cp_rank=1, positions=at).ours
    else:
        with pytest.raises(TraceError, match=says):
            write_training_routes(store, new, 0, 0, *given, cp_rank=1, positions=at)


def test_an_audited_step_needs_routes_for_all_layers_of_the_engine():
    store = MemoryStore()
    manifest = sealed_r3(store, SAMPLES, training=True)
    new = NewTrainingSet(manifest, R2)
    _, layers = STAGES[0]
    write_stage(store, new, 0, 0, layers, SAMPLES)
    geometry = replace(GEOMETRY, layers=tuple(layers))
    with pytest.raises(TraceError, match=r"routes for .*, but steps/000000/manifest.json has"):
        seal_training_set(store, new, geometry)
    assert store.size(keys.training_set(0)) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"manifest_sha256": "1" * 64}, "recorded for a manifest with content 1111"),
        ({"policies": [{"version": 0, "weights_sha256": "2" * 64}]}, "2222|policy 0"),
    ],
)
def test_the_parts_of_a_recorded_set_belong_together(change, says):
    store, record = MemoryStore(), MemoryStore()
    sealed_r2(store, SAMPLES)
    write_recorded_set(store, record, 0)
    key = training_commits(record)[-1]
    others = [{"version": 0, "weights_sha256": "1" * 64}]
    changed = {training_commits(record)[0]: {"policies": others}} if "policies" in change else {}
    body = json.loads(record.read(keys.manifest(0)))
    for part, changes in {**changed, key: change}.items():
        digest = resign(record, part, **changes)["content_sha256"]
        for ref in body["data"]:
            if ref["commit"] == part:
                ref["commit_sha256"] = digest
    put_signed(record, keys.manifest(0), body)
    assert any(re.search(says, str(problem)) for problem in verify(record).problems)


def test_a_file_in_the_folder_of_another_step_is_found():
    """Sweeping the other step would remove it."""
    store = MemoryStore()
    sealed_r3(store, SAMPLES)
    body = json.loads(store.read(keys.manifest(0)))
    ref = body["data"][0]
    moved = ref["key"].replace("steps/000000", "steps/000001")
    store.create(moved, store.read(ref["key"]))
    ref["key"] = moved
    put_signed(store, keys.manifest(0), body)
    assert any(f"it names {moved}, expected objects" in str(p) for p in verify(store).problems)
