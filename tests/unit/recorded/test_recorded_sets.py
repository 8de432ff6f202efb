"""Writing recorded sets, and replaying them in runs."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pipeline.policies.versions import refer_policy
from pipeline.recorded import (
    check_recorded,
    check_replay,
    expected_of,
    is_recorded,
    seal_replay,
    write_recorded_set,
)
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, new_write_id
from pipeline.run.description import run_digest
from pipeline.run.plan import find_step_plans, publish_plan
from pipeline.store import ObjectMissingError, open_store
from pipeline.traces import (
    Geometry,
    Routes,
    TraceError,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    used_routes,
    write_shard,
)
from pipeline.traces.format import parquet
from pipeline.upkeep.prune import prune
from pipeline.upkeep.verify import verify
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
    same_sample,
    sealed_r2,
    sealed_r3,
    train,
    without_routes,
    write_run,
)

SAMPLES = make_samples()
SEALED = {"R3": sealed_r3, "R2": sealed_r2}


@pytest.fixture
def stores(tmp_path):
    """A run, a recorded set, and a run that replays the set."""
    return [open_store(str(tmp_path / name)) for name in ("run", "set", "again")]


def objects(store) -> dict[str, bytes]:
    return {info.key: store.read(info.key) for info in store.list("")}


def assert_same(store, samples=SAMPLES) -> None:
    """Check that the step contains these samples, with the routes that training used."""
    manifest = used_routes(store, 0)
    for layers in (GEOMETRY.layers, (5,), (2, 1)):
        found = read_routes(store, manifest, manifest.ids, layers)
        assert all(equal(found[s.id], layers_of(s.routes, layers)) for s in samples)
    found = read_samples(store, manifest, [s.id for s in samples])
    assert all(map(same_sample, found, samples))
    assert not verify(store).problems


@pytest.mark.parametrize("kind", ["R3", "R2", "audit"])
def test_a_step_survives_recording_and_replay(stores, kind):
    """Samples and routes survive run -> set -> run -> set, although the earlier stores are
    removed. In an audit, the trainer's routes replace the engine's. Repeating changes nothing."""
    run, record, again = stores
    if kind == "audit":
        others = make_samples(known=0.5)
        engine = [replace(s, routes=o.routes) for s, o in zip(SAMPLES, others, strict=True)]
        sealed_r3(run, engine, training=True)
        train(run, SAMPLES)
    else:
        SEALED[kind](run, SAMPLES)
    for _ in range(2):
        write_recorded_set(run, record, 0)
    assert objects(record) == objects(run)
    assert_same(record)
    mode = "R3" if kind == "R3" else "R2"
    write_run(again, SAMPLES, mode, replay_file="record")
    seal_replay(again, record, 0, make_window())
    manifest = read_manifest(again, 0)
    assert manifest.provenance == {"R3": R3, "R2": R2}[mode]
    assert (manifest.run, manifest.training) == (run_digest(again), False)
    before = objects(again)
    for store in (run, record):
        for key in objects(store):
            store.delete(key)
    assert_same(again)
    third = open_store(again.uri + "-set")
    write_recorded_set(again, third, 0)
    seal_replay(again, third, 0, make_window())
    assert objects(again) == before
    assert_same(third)


@pytest.mark.parametrize("kind", ["R3", "R2"])
def test_a_set_that_is_being_written_has_no_problems(stores, kind):
    """Verify finds nothing after any object. The set gets all plans, so that a replay at a
    different temperature can be refused."""
    run, _, _ = stores
    SEALED[kind](run, SAMPLES)
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


@pytest.mark.parametrize("kind", ["R3", "R2"])
def test_any_object_that_a_set_lacks_is_copied_again(stores, kind):
    """Its writer was killed, or the object was removed since."""
    run, record, _ = stores
    SEALED[kind](run, SAMPLES)
    publish_plan(run, make_plan())
    write_recorded_set(run, record, 0)
    for key, content in objects(record).items():
        record.delete(key)
        assert not is_recorded(run, record, 0)
        with pytest.raises(ObjectMissingError, match=key):
            check_recorded(run, record, 0)
        write_recorded_set(run, record, 0)
        assert record.read(key) == content
        check_recorded(run, record, 0)
        assert is_recorded(run, record, 0)
    (lost, *_) = (file.key for file in read_manifest(record, 0).files)
    record.delete(lost)
    record.create(lost, b"short")
    with pytest.raises(CorruptObjectError, match=rf"{lost}.*5 bytes"):
        write_recorded_set(run, record, 0)


def test_a_pruned_step_completes_a_set_except_for_its_samples_and_routes(stores):
    run, record, _ = stores
    sealed_r3(run, SAMPLES)
    plan = publish_plan(run, make_plan()).key
    write_recorded_set(run, record, 0)
    record.delete(plan)
    list(prune(run, 0))
    write_recorded_set(run, record, 0)
    assert record.read(plan) == run.read(plan)
    record.delete(read_manifest(record, 0).files[0].key)
    with pytest.raises(ObjectMissingError):
        write_recorded_set(run, record, 0)
    with pytest.raises(TraceError, match="were removed"):
        write_recorded_set(run, MemoryStore(), 0)
    again = MemoryStore()
    write_run(again, SAMPLES, "R3")
    with pytest.raises(TraceError, match="were removed"):
        check_replay(run, 0, expected_of(again, None))


def test_a_pruned_step_of_a_set_stays_pruned(stores):
    run, record, _ = stores
    sealed_r3(run, SAMPLES)
    write_recorded_set(run, record, 0)
    list(prune(record, 0))
    with pytest.raises(TraceError, match="were removed"):
        check_recorded(run, record, 0)
    assert not verify(record).problems


def test_a_set_of_another_run_is_not_overwritten(stores):
    """The other run has the same ids and tokens, but another reward."""
    run, record, other = stores
    sealed_r3(run, SAMPLES)
    write_recorded_set(run, record, 0)
    before = objects(record)
    *rest, last = SAMPLES
    sealed_r3(other, [*rest, replace(last, reward=0.125)])
    for compare in (write_recorded_set, check_recorded):
        with pytest.raises((TraceError, ObjectMissingError)):
            compare(other, record, 0)
    assert before.items() <= objects(record).items()
    assert_same(record)


def test_a_step_without_routes_is_not_recorded(stores):
    run, record, _ = stores
    write_shard(run, 0, 0, new_write_id(), without_routes(SAMPLES), None, None)
    seal(run, 0, 1, lambda _: [s.id for s in SAMPLES], 0)
    with pytest.raises(TraceError, match="no routes were recorded"):
        write_recorded_set(run, record, 0)


def test_a_step_with_different_weights_of_policy_0_is_not_sealed(stores):
    """The check needs no model, because the set keeps the weights digests."""
    run, _, again = stores
    policies = {0: "a" * 64, 7: "b" * 64}
    write_shard(run, 0, 0, new_write_id(), SAMPLES, GEOMETRY, R3, policies=policies)
    seal(run, 0, 1, lambda _: [sample.id for sample in SAMPLES], 0)
    write_run(again, SAMPLES, "R3")
    refer_policy(again, 0, [], "c" * 64)
    with pytest.raises(TraceError, match=f"step 0: .*{'a' * 64}, .*{'c' * 64};"):
        seal_replay(again, run, 0, make_window())
    assert again.size(keys.manifest(0)) is None
    seal_replay(again, run, 0, make_window(), other_weights=True)
    assert read_manifest(again, 0).policies == policies


def changed_tokens(samples):
    """Return samples whose last prompt differs in one token, as with a different tokenizer."""
    *rest, last = samples
    prompt_P = last.prompt_tokens_P.copy()
    prompt_P[-1] += 1
    return [*rest, replace(last, prompt_tokens_P=prompt_P)]


@pytest.mark.parametrize(
    ("samples", "mode", "window", "says"),
    [
        (changed_tokens(SAMPLES), "R3", make_window(), "000000/2/0 has token digest"),
        (SAMPLES[:4], "R3", make_window(), "000000/2/0 has prompt 2"),
        (SAMPLES, "R2", make_window(), "R3, expected R2"),
        (SAMPLES, "R3", make_window(prompts=2), "not expected: 000000/2/0, 000000/2/1"),
        (SAMPLES, "R3", make_window(n=3), "missing: 000000/0/2, 000000/1/2, 000000/2/2"),
        (SAMPLES, "R3", make_window(version=1), r"policy versions \(0,\)"),
        (SAMPLES, "R3", make_window(step=1), r"steps/000001/manifest\.json"),
    ],
)
def test_a_set_that_does_not_match_is_refused(stores, samples, mode, window, says):
    """The set has a different tokenizer, prompt table, kind, batch or policy version, or lacks the
    step, so the step is not sealed."""
    run, _, again = stores
    sealed_r3(run, SAMPLES)
    write_run(again, samples, mode)
    step = window.plans[0].step
    with pytest.raises((TraceError, ObjectMissingError), match=says):
        seal_replay(again, run, step, window)
    assert not list(again.list("steps/"))


def test_a_set_of_a_different_model_is_refused(stores):
    run, _, again = stores
    geometry = Geometry(32, 4, (1, 2, 5))
    samples = make_samples(geometry=geometry)
    write_shard(run, 0, 0, new_write_id(), samples, geometry, R3)
    seal(run, 0, 1, lambda _: [s.id for s in samples], 0)
    write_run(again, samples, "R3")
    with pytest.raises(TraceError, match=r"\"experts\": 32.*\"experts\": 16"):
        seal_replay(again, run, 0, make_window())


@pytest.mark.parametrize("role", ["samples", "routes", "manifest"])
@pytest.mark.parametrize("damage", ["lost", "short", "flipped"])
def test_a_damaged_set_is_not_replayed(stores, role, damage):
    run, _, again = stores
    sealed_r3(run, SAMPLES)
    write_run(again, SAMPLES, "R3")
    key = next(key for key in objects(run) if f".{role}.parquet" in key or f"/{role}.json" in key)
    content = bytearray(run.read(key))
    content[len(content) // 2] ^= 1
    run.delete(key)
    if damage != "lost":
        run.create(key, bytes(content) if damage == "flipped" else bytes(content[:-1]))
    with pytest.raises((ObjectMissingError, CorruptObjectError, TraceError), match=key):
        seal_replay(again, run, 0, make_window())
    assert again.size(keys.manifest(0)) is None


def test_each_row_group_is_read_once_before_a_replay(monkeypatch):
    """Otherwise the time grows with the square of the number of small samples."""
    monkeypatch.setattr(parquet, "_SMALL", 0)
    samples = make_samples(prompts=300, n=1, known=1.0)
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
    check_replay(store, 0, expected_of(store, make_window(prompts=300, n=1)))
    assert ranges
    assert set(ranges.values()) == {1}


def with_unknown(samples, rows, **changes):
    """Return samples of which the longest has rows whose routing is unknown."""
    longest = max(samples, key=lambda sample: len(sample.tokens_S))
    valid_T = np.ones(len(longest.routes.valid_T), bool)
    valid_T[rows] = False
    changed = replace(longest, routes=Routes(longest.routes.sets_TLK, valid_T), **changes)
    return changed.id, [changed if sample is longest else sample for sample in samples]


@pytest.mark.parametrize("kind", ["R3", "R2"])
@pytest.mark.parametrize("finish", ["stop", "abort"])
@pytest.mark.parametrize("rows", [slice(-2, None), slice(0, 1), slice(4, 5)])
def test_a_finished_response_with_unknown_rows_is_refused(stores, kind, finish, rows):
    """Cases: its last, its first or a middle row. An aborted response may have unknown rows."""
    run, _, again = stores
    samples = make_samples(known=1.0)
    mask_G = np.ones_like(max(samples, key=lambda s: len(s.tokens_S)).loss_mask_G)
    id, samples = with_unknown(samples, rows, finish_reason=finish, loss_mask_G=mask_G)
    SEALED[kind](run, samples)
    write_run(again, samples, kind)
    if finish == "abort":
        seal_replay(again, run, 0, make_window())
        return
    with pytest.raises(TraceError, match=f"sample {id}: "):
        seal_replay(again, run, 0, make_window())
    disabled = replace(expected_of(again, make_window()), kind=None, geometry=None)
    check_replay(run, 0, disabled)


@pytest.mark.parametrize("after", [0, 1])
def test_the_routing_of_an_inserted_token_may_be_unknown(stores, after):
    """Such a token is not in the loss. The routing of its neighbours must be known."""
    run, _, _ = stores
    samples = make_samples(known=1.0)
    longest = max(samples, key=lambda sample: len(sample.tokens_S))
    mask_G = np.ones_like(longest.loss_mask_G)
    mask_G[1:3] = False
    rows = len(longest.prompt_tokens_P) + np.array([1, 2]) + after
    id, samples = with_unknown(samples, rows, loss_mask_G=mask_G)
    sealed_r3(run, samples)
    write_run(run, samples, "R3")
    if after:
        with pytest.raises(TraceError, match=f"sample {id}: "):
            check_replay(run, 0, expected_of(run, make_window()))
    else:
        check_replay(run, 0, expected_of(run, make_window()))
