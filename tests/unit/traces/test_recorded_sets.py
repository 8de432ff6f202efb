"""Writing recorded sets, and replaying them in runs."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from pipeline.traces.recorded_sets import check_recorded, is_recorded
from pipeline.traces.replayed_sets import check_replay, expected_of

from pipeline.policies.versions import refer_policy
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, new_write_id
from pipeline.run.plan import find_step_plans, publish_plan
from pipeline.store import ObjectMissingError, open_store
from pipeline.traces import (
    Geometry,
    NewTrainingSet,
    Routes,
    TraceError,
    read_manifest,
    read_routes,
    read_samples,
    routes_digest,
    seal,
    seal_replay,
    seal_training_set,
    used_routes,
    write_recorded_set,
    write_shard,
    write_training_routes,
)
from pipeline.upkeep.prune import prune
from pipeline.upkeep.verify import verify
from tests.forged_sets import name_all
from tests.memory_store import MemoryStore
from tests.samples import (
    GEOMETRY,
    R2,
    R3,
    equal,
    layers_of,
    make_plan,
    make_samples,
    make_window,
    sealed_r2,
    sealed_r3,
    train,
    without_routes,
    write_run,
    write_stage,
)

SAMPLES = make_samples()
SEALED = {"R3": sealed_r3, "R2": sealed_r2}


@pytest.fixture
def stores(tmp_path):
    """A run, a recorded set, and a run that replays the set."""
    return [open_store(str(tmp_path / name)) for name in ("run", "set", "again")]


def assert_same(store, samples=SAMPLES) -> None:
    """Check that the sealed step contains these samples with their routes."""
    manifest = read_manifest(store, 0)
    routes = read_routes(store, manifest, manifest.ids)
    for sample in samples:
        assert equal(routes[sample.id], sample.routes)
    for layers in ((5,), (1, 2)):
        some = read_routes(store, manifest, manifest.ids, layers)
        assert all(equal(some[s.id], layers_of(s.routes, layers)) for s in samples)
    rows = manifest.rows.to_pylist()
    by_id = {sample.id: sample for sample in samples}
    assert [r["routes_digest"] for r in rows] == [
        routes_digest(by_id[r["id"]].routes, GEOMETRY) for r in rows
    ]
    found = read_samples(store, manifest, manifest.ids)
    assert all((s.tokens_S == by_id[s.id].tokens_S).all() for s in found)
    assert not verify(store).problems


@pytest.mark.parametrize("kind", ["R3", "R2"])
def test_a_step_survives_recording_and_replay(stores, kind):
    """Samples, routes and digests survive run -> set -> run -> set. In R2, the files of all stages
    and data-parallel ranks are joined. Repeating an operation changes nothing."""
    run, record, again = stores
    SEALED[kind](run, SAMPLES)
    for _ in range(2):
        write_recorded_set(run, record, 0)
    assert_same(record)
    assert read_manifest(record, 0).provenance == {"R3": R3, "R2": R2}[kind]
    write_run(again, SAMPLES, kind, replay_file="record")
    for _ in range(2):
        seal_replay(again, record, 0, make_window())
    assert_same(again)
    objects = {info.key: again.read(info.key) for info in again.list("")}
    seal_replay(again, record, 0, make_window())
    assert {info.key: again.read(info.key) for info in again.list("")} == objects

    third = open_store(again.uri + "-set")
    write_recorded_set(again, third, 0)
    assert_same(third)


def test_a_set_contains_its_sampling_parameters(stores):
    """The step's plan is copied, so that a replay at a different temperature can be refused."""
    run, record, _ = stores
    sealed_r3(run, SAMPLES)
    plan = publish_plan(run, make_plan()).key
    for _ in range(2):
        write_recorded_set(run, record, 0)
    assert record.read(plan) == run.read(plan)


class Killed(BaseException):
    """Ends a call as `kill -9` ends a process."""


class Failing(MemoryStore):
    """A store whose writer is killed instead of creating the first key with the given ending."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.ending = ending

    def create(self, key, data) -> None:
        if key.endswith(self.ending):
            self.ending = "nothing"
            raise Killed
        super().create(key, data)


def test_a_pruned_step_still_gives_its_plans_to_the_set(stores):
    """The writer was killed before it had copied the plans. Prune refuses the step until then, and
    an earlier release pruned it."""
    run, _, _ = stores
    sealed_r3(run, SAMPLES)
    plan = publish_plan(run, make_plan()).key
    record = Failing("plan.json")
    with pytest.raises(Killed):
        write_recorded_set(run, record, 0)
    assert not verify(record).problems
    with pytest.raises(ObjectMissingError, match=rf"^{plan} .*let the run write it"):
        check_recorded(run, record, 0)
    list(prune(run, 0))
    write_recorded_set(run, record, 0)
    assert record.read(plan) == run.read(plan)


@pytest.mark.parametrize("kind", ["R3", "R2"])
def test_a_set_that_is_being_written_has_no_problems(stores, kind):
    """Verify finds nothing after any object, even if a step has several sub-plans, or if the
    engine's routes are left out."""
    run, _, _ = stores
    sealed_r3(run, SAMPLES, training=kind == "R2")
    if kind == "R2":
        train(run, SAMPLES)
    plan = make_plan()
    for number, prompt in enumerate(plan.prompts):
        publish_plan(run, replace(plan, prompts=(prompt,), sub_plan=number))
    found = []

    class Watched(MemoryStore):
        def create(self, key, data) -> None:
            super().create(key, data)
            found.extend((key, problem) for problem in verify(self).problems)

    record = Watched()
    write_recorded_set(run, record, 0)
    assert found == []
    assert len(find_step_plans(record, 0)) == 3
    assert read_manifest(record, 0).provenance.kind == kind


def test_lost_routes_of_an_unsealed_step_are_reported(stores):
    """A library's step before its seal looks like a step of a set that is being copied."""
    _, record, _ = stores
    write_shard(record, 0, 0, new_write_id(), SAMPLES, GEOMETRY, R3)
    assert not verify(record).problems
    (routes,) = [i.key for i in record.list("steps/") if i.key.endswith(".routes.parquet")]
    record.delete(routes)
    (problem,) = verify(record).problems
    assert routes in str(problem)


@pytest.mark.parametrize("kind", ["R3", "R2"])
def test_files_that_a_sealed_set_lacks_are_copied_again(stores, kind):
    run, record, _ = stores
    SEALED[kind](run, SAMPLES)
    write_recorded_set(run, record, 0)
    lost = [ref.key for ref in read_manifest(record, 0).files]
    for key in lost:
        record.delete(key)
    write_recorded_set(run, record, 0)
    assert_same(record)
    record.delete(lost[0])
    record.create(lost[0], b"short")
    with pytest.raises(CorruptObjectError, match=rf"{lost[0]}.*5 bytes"):
        write_recorded_set(run, record, 0)


@pytest.mark.parametrize("kind", ["R3", "R2"])
def test_commits_that_a_sealed_set_lacks_are_copied_again(stores, kind):
    run, record, _ = stores
    SEALED[kind](run, SAMPLES)
    write_recorded_set(run, record, 0)
    lost = {ref.commit for ref in read_manifest(record, 0).files}
    for key in lost:
        record.delete(key)
    assert not is_recorded(run, record, 0)
    with pytest.raises(ObjectMissingError, match="let the run write it"):
        check_recorded(run, record, 0)
    write_recorded_set(run, record, 0)
    assert is_recorded(run, record, 0)
    assert_same(record)


@pytest.mark.parametrize("kind", ["R3", "R2"])
def test_a_set_that_lost_a_file_is_refused_if_the_runs_step_is_pruned(stores, kind):
    run, record, _ = stores
    SEALED[kind](run, SAMPLES)
    write_recorded_set(run, record, 0)
    list(prune(run, 0))
    write_recorded_set(run, record, 0)
    record.delete(read_manifest(record, 0).files[0].key)
    with pytest.raises(ObjectMissingError):
        write_recorded_set(run, record, 0)


def test_a_step_without_its_plan_is_not_recorded_yet(stores):
    run, record, _ = stores
    sealed_r3(run, SAMPLES)
    plan = publish_plan(run, make_plan()).key
    assert not is_recorded(run, record, 0)
    write_recorded_set(run, record, 0)
    assert is_recorded(run, record, 0)
    record.delete(plan)
    assert not is_recorded(run, record, 0)


def test_a_pruned_step_of_a_set_stays_pruned(stores):
    run, record, _ = stores
    sealed_r3(run, SAMPLES)
    write_recorded_set(run, record, 0)
    list(prune(record, 0))
    write_recorded_set(run, record, 0)
    assert not verify(record).problems
    assert not list(prune(record, 0))


@pytest.mark.parametrize("kind", ["R3", "R2"])
def test_a_run_can_be_replayed_without_a_set(stores, kind):
    """The replaying run copies the steps, so it remains complete even if the other run is
    removed."""
    run, _, again = stores
    SEALED[kind](run, SAMPLES)
    write_run(again, SAMPLES, kind, replay_file="run")
    seal_replay(again, run, 0, make_window())
    for info in list(run.list("")):
        run.delete(info.key)
    assert_same(again)


def test_a_step_with_different_weights_of_policy_0_is_not_sealed(stores):
    """The check needs no model, because the set keeps the weights digests."""
    run, record, again = stores
    policies = {0: "a" * 64, 7: "b" * 64}
    write_shard(run, 0, 0, new_write_id(), SAMPLES, GEOMETRY, R3, policies=policies)
    seal(run, 0, 1, lambda _: [sample.id for sample in SAMPLES], 0)
    write_recorded_set(run, record, 0)
    assert read_manifest(record, 0).policies == policies
    write_run(again, SAMPLES, "R3")
    refer_policy(again, 0, [], "c" * 64)
    with pytest.raises(
        TraceError, match=f"step 0: .*weights {'a' * 64}, this run's policy 0 has {'c' * 64};"
    ):
        seal_replay(again, record, 0, make_window())
    assert again.size(keys.manifest(0)) is None
    seal_replay(again, record, 0, make_window(), other_weights=True)
    assert read_manifest(again, 0).policies == policies


def test_a_recorded_set_excludes_an_audit(stores):
    """In R2, the engine's routes may also be recorded, but the set contains only the trainer's."""
    run, record, _ = stores
    sealed_r3(run, make_samples(seed=5), training=True)
    theirs = make_samples(seed=5)
    for sample in theirs:
        sample.routes.sets_TLK[:] = np.arange(4) + 3
    train(run, theirs)
    write_recorded_set(run, record, 0)
    assert_same(record, theirs)
    keys = [info.key for info in record.list("")]
    assert not [key for key in keys if "rollout" in key and key.endswith("routes.parquet")]


def test_a_set_of_another_run_is_not_overwritten(stores):
    run, record, other = stores
    sealed_r3(run, SAMPLES)
    write_recorded_set(run, record, 0)
    sealed_r3(other, make_samples(seed=3))
    with pytest.raises(
        TraceError, match=r"samples or routes differ from those in .*choose a different record_f"
    ):
        write_recorded_set(other, record, 0)
    assert_same(record)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"logprobs_G": np.float32(-1)}, "logprobs_G"),
        ({"loss_mask_G": False}, "loss_mask_G"),
        ({"finish_reason": "length"}, "finish_reason"),
        ({"seed": 99}, "seed"),
        ({"extras": {"format": 0.5}}, "extras"),
    ],
)
def test_a_set_with_the_same_tokens_and_routes_but_another_sample_is_refused(stores, change, field):
    """The manifests' rows are equal. The set remains, and prune keeps the run's step."""
    run, record, other = stores
    sealed_r3(run, SAMPLES)
    write_recorded_set(run, record, 0)
    *rest, last = SAMPLES
    ((name, value),) = change.items()
    if name.endswith("_G"):
        value = np.full_like(getattr(last, name), value)
    sealed_r3(other, [*rest, replace(last, **{name: value})])
    says = rf"000000/manifest.json in .*: sample {last.id} differs from .* in {field}; choose a"
    for compare in (write_recorded_set, check_recorded):
        with pytest.raises(TraceError, match=says):
            compare(other, record, 0)
    assert_same(record)


def test_a_set_with_the_same_samples_in_other_files_is_accepted(stores):
    """A run was recorded, and repeated with the same result. Unknown log-probs are equal."""
    run, record, other = stores
    unknown = [
        replace(sample, logprobs_G=np.full_like(sample.logprobs_G, np.nan)) for sample in SAMPLES
    ]
    sealed_r3(run, unknown)
    write_recorded_set(run, record, 0)
    parts = (unknown[:2], unknown[2:])
    for shard, part in enumerate(parts):
        write_shard(other, 0, shard, new_write_id(), part, GEOMETRY, R3)
    seal(other, 0, 2, lambda shard: [sample.id for sample in parts[shard]], 0)
    write_recorded_set(other, record, 0)
    check_recorded(other, record, 0)


def test_an_incomplete_set_is_completed(stores):
    """The writer died between two objects. The next writer continues, and compares existing
    objects with those that it would write."""
    run, record, _ = stores
    sealed_r3(run, SAMPLES)
    first = next(iter(run.list("steps/000000/rollout/"))).key
    record.create(first, run.read(first))
    write_recorded_set(run, record, 0)
    assert_same(record)
    broken = open_store(record.uri + "-broken")
    broken.create(first, b"something else")
    with pytest.raises(TraceError, match="exists with different content"):
        write_recorded_set(run, broken, 0)


def test_a_step_without_routes_is_not_recorded(stores):
    run, record, _ = stores
    samples = without_routes(SAMPLES)
    write_shard(run, 0, 0, new_write_id(), samples, None, None)
    seal(run, 0, 1, lambda _: [s.id for s in samples], 0)
    with pytest.raises(TraceError, match="no routes were recorded"):
        write_recorded_set(run, record, 0)


def changed_tokens(samples):
    """Return samples whose last prompt differs in one token, as with a different tokenizer."""
    *rest, last = samples
    prompt_P = last.prompt_tokens_P.copy()
    prompt_P[-1] += 1
    return [*rest, replace(last, prompt_tokens_P=prompt_P)]


@pytest.mark.parametrize(
    ("samples", "mode", "window", "says"),
    [
        (
            changed_tokens(SAMPLES),
            "R3",
            make_window(),
            r"sample 000000/2/0 has token digest [0-9a-f]{64}; with this run's prompt and "
            r"tokenizer it is [0-9a-f]{64}; use the data.train_files",
        ),
        (
            SAMPLES[:4],
            "R3",
            make_window(),
            "sample 000000/2/0 has prompt 2, which is not in this run's prompt table",
        ),
        (
            SAMPLES,
            "R2",
            make_window(),
            "its routes are of kind R3, expected R2; "
            "set actor_rollout_ref.actor.router_replay.mode=R3",
        ),
        (SAMPLES, "R3", make_window(prompts=2), "not expected: 000000/2/0, 000000/2/1"),
        (SAMPLES, "R3", make_window(n=3), "missing: 000000/0/2, 000000/1/2, 000000/2/2"),
        (SAMPLES, "R3", make_window(version=1), r"policy versions \(0,\)"),
    ],
)
def test_a_set_that_does_not_match_is_refused(stores, samples, mode, window, says):
    """The set has a different tokenizer, prompt table, kind, batch or policy version, so the step
    is not sealed."""
    run, record, again = stores
    sealed_r3(run, SAMPLES)
    write_recorded_set(run, record, 0)
    write_run(again, samples, mode)
    with pytest.raises(TraceError, match=says):
        seal_replay(again, record, 0, window)
    assert not list(again.list("steps/"))


def test_a_set_of_a_different_model_is_refused(stores):
    run, record, again = stores
    geometry = Geometry(32, 4, (1, 2, 5))
    samples = make_samples(geometry=geometry)
    write_shard(run, 0, 0, new_write_id(), samples, geometry, R3)
    seal(run, 0, 1, lambda _: [s.id for s in samples], 0)
    write_recorded_set(run, record, 0)
    write_run(again, samples, "R3")
    with pytest.raises(
        TraceError, match=r"\"experts\": 32.*this run's model has .*\"experts\": 16"
    ):
        seal_replay(again, record, 0, make_window())


def test_a_set_without_the_step_is_reported(stores):
    run, record, again = stores
    sealed_r3(run, SAMPLES)
    write_recorded_set(run, record, 0)
    write_run(again, SAMPLES, "R3")
    with pytest.raises(ObjectMissingError, match=r"steps/000001/manifest\.json"):
        seal_replay(again, record, 1, make_window(step=1))


def test_each_row_group_is_read_once_before_a_replay():
    """Otherwise the time grows with the square of the number of small samples."""
    samples = make_samples(prompts=300, n=1)
    ranges = Counter()

    class Counted(MemoryStore):
        def read_ranges(self, key, wanted, size=None):
            if key.endswith(".samples.parquet"):
                ranges.update((key, *one) for one in wanted)
            return super().read_ranges(key, wanted, size)

    store = Counted()
    write_run(store, samples, "R3")
    sealed_r3(store, samples)
    ranges.clear()
    check_replay(store, 0, expected_of(store, 0, make_window(prompts=300, n=1)))
    assert ranges
    assert set(ranges.values()) == {1}


def stages(*written):
    """Return a function that writes the commits for each (stage, dp rank, layers, samples)."""

    def write(store) -> None:
        write_shard(store, 0, 0, new_write_id(), without_routes(SAMPLES), None, None)
        seal(store, 0, 1, lambda _: [s.id for s in SAMPLES], 0, training=True)
        new = NewTrainingSet(read_manifest(store, 0), R2)
        for stage, dp_rank, layers, samples in written:
            write_stage(store, new, stage, dp_rank, layers, samples)
        with pytest.raises(TraceError):
            seal_training_set(store, new, GEOMETRY)
        name_all(store, new)

    return write


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (
            stages((0, 0, (1, 2), SAMPLES), (1, 0, (5,), SAMPLES[1:])),
            r"sample 000000/0/0: 0 rows of routes, expected \d+: .* in layers \[5\]",
        ),
        (
            stages((0, 0, (1, 2), SAMPLES), (1, 0, (2, 5), SAMPLES)),
            r"sample 000000/0/0: position 0 is duplicated, in layers \[2\]",
        ),
        (
            stages((0, 0, (1, 2, 5), SAMPLES[:4]), (0, 1, (1, 2, 5), SAMPLES[2:])),
            r"sample 000000/1/0: position 0 is duplicated, in layers \[1, 2, 5\]; "
            "samples affected: 000000/1/0, 000000/1/1$",
        ),
    ],
)
def test_trainers_files_that_do_not_join_are_refused(stores, write, says):
    """A rank's file lacks a sample, two stages have the same layer, or two ranks have the same
    sample."""
    run, record, _ = stores
    write(run)
    for attempt in (lambda: used_routes(run, 0), lambda: write_recorded_set(run, record, 0)):
        with pytest.raises(TraceError, match=says):
            attempt()
    assert any(re.search(says, problem.text) for problem in verify(run).problems)


def test_trainers_rows_that_differ_from_the_samples_are_refused(stores):
    """One stage has one row too few for a sample, and another has a sample that is not in the
    step."""
    run, record, _ = stores
    write_shard(run, 0, 0, new_write_id(), without_routes(SAMPLES), None, None)
    seal(run, 0, 1, lambda _: [s.id for s in SAMPLES], 0, training=True)
    new = NewTrainingSet(read_manifest(run, 0), R2)
    write_stage(run, new, 0, 0, (1, 2), SAMPLES)
    with pytest.raises(TraceError, match="unknown: 000000/3/0"):
        write_stage(run, new, 1, 0, (5,), make_samples(prompts=4))
    routes = {sample.id: layers_of(sample.routes, (5,)) for sample in SAMPLES}
    at = {id: np.arange(len(found.valid_T)) for id, found in routes.items()}
    id = SAMPLES[3].id
    routes[id] = Routes(routes[id].sets_TLK[:-1], routes[id].valid_T[:-1])
    one = replace(GEOMETRY, layers=(5,))
    with pytest.raises(TraceError, match=f"sample {id}: routes of shape"):
        write_training_routes(run, new, 1, 0, routes, one)
    at[id] = at[id][:-1]
    write_training_routes(run, new, 1, 0, routes, one, positions=at)
    name_all(run, new)
    with pytest.raises(TraceError, match=rf"sample {id}: \d+ rows of routes, expected \d+"):
        write_recorded_set(run, record, 0)
    assert any(f"sample {id}" in p.text for p in verify(run).problems)


def with_unknown(sample, rows, **changes):
    """Return a sample in which the routing of some rows is unknown."""
    valid_T = np.ones(len(sample.routes.valid_T), bool)
    valid_T[rows] = False
    sets_TLK = sample.routes.sets_TLK.copy()
    sets_TLK[~valid_T] = np.arange(GEOMETRY.topk)
    return replace(sample, routes=Routes(sets_TLK, valid_T), **changes)


@pytest.mark.parametrize("kind", ["R3", "R2"])
@pytest.mark.parametrize("finish", ["stop", "length", "abort"])
@pytest.mark.parametrize("rows", [slice(-2, None), slice(0, 1), slice(4, 5)])
def test_a_finished_response_with_unknown_rows_is_refused(stores, kind, finish, rows):
    """Cases: its last, its first or a middle row. An aborted response may have unknown rows."""
    run, record, again = stores
    samples = make_samples(known=1.0)
    longest = max(range(len(samples)), key=lambda i: len(samples[i].tokens_S))
    mask_G = np.ones_like(samples[longest].loss_mask_G)
    samples[longest] = with_unknown(
        samples[longest], rows, finish_reason=finish, loss_mask_G=mask_G
    )
    SEALED[kind](run, samples)
    write_recorded_set(run, record, 0)
    write_run(again, samples, kind)
    if finish == "abort":
        seal_replay(again, record, 0, make_window())
        return
    with pytest.raises(TraceError, match=f"sample {samples[longest].id}: "):
        seal_replay(again, record, 0, make_window())
    disabled = replace(expected_of(again, 0, make_window()), kind=None, geometry=None)
    check_replay(record, 0, disabled)


def test_the_routing_of_an_inserted_token_may_be_unknown(stores):
    """Such a token is not in the loss. The routing of its neighbours must be known."""
    run, record, again = stores
    samples = make_samples(known=1.0)
    longest = max(range(len(samples)), key=lambda i: len(samples[i].tokens_S))
    mask_G = np.ones_like(samples[longest].loss_mask_G)
    mask_G[1:3] = False
    rows = len(samples[longest].prompt_tokens_P) + np.array([1, 2])
    samples[longest] = with_unknown(samples[longest], rows, loss_mask_G=mask_G)
    sealed_r3(run, samples)
    write_recorded_set(run, record, 0)
    write_run(again, samples, "R3")
    seal_replay(again, record, 0, make_window())
    other = open_store(again.uri + "-other")
    samples[longest] = with_unknown(samples[longest], rows + 1, loss_mask_G=mask_G)
    sealed_r3(other, samples)
    write_run(other, samples, "R3")
    with pytest.raises(TraceError, match=f"sample {samples[longest].id}: "):
        check_replay(other, 0, expected_of(other, 0, make_window()))
