"""The trainer's routes (R2) must be complete and belong to their step, or they are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.model.geometry import Geometry
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from pipeline.traces import (
    NewTrainerRoutes,
    Routes,
    TraceError,
    read_manifest,
    read_routes,
    seal,
    seal_trainer_routes,
    used_routes,
    write_shard,
    write_trainer_routes,
)
from pipeline.upkeep.verify import verify
from tests.memory_store import MemoryStore
from tests.samples import (
    GEOMETRY,
    R2,
    STAGES,
    equal,
    layers_of,
    make_samples,
    of_one_token,
    sealed_r2,
    sealed_r3,
    train,
    without_routes,
    write_stage,
)

SAMPLES = make_samples()
OTHERS = [
    replace(s, routes=o.routes) for s, o in zip(SAMPLES, make_samples(known=0.5), strict=True)
]
"""The same samples with other rows valid."""


def sealed(samples=SAMPLES) -> tuple[MemoryStore, NewTrainerRoutes]:
    """Seal a step whose trainer records its routes, which are not written yet."""
    store = MemoryStore()
    write_shard(store, 0, 0, new_write_id(), without_routes(samples), None, None)
    manifest = seal(store, 0, 1, lambda _: [s.id for s in samples], 0, training=True).all()
    return store, NewTrainerRoutes(manifest, R2, {0: "a" * 64})


def read_used(store, layers=None) -> dict[str, Routes]:
    used = used_routes(store, 0)
    return read_routes(store, used, used.ids, layers)


def test_the_routes_of_the_trainer_are_read():
    store = MemoryStore()
    sealed_r2(store, SAMPLES)
    assert all(equal(read_used(store)[s.id], s.routes) for s in SAMPLES)
    used = used_routes(store, 0)
    assert used.rows["rows_valid"].to_pylist() == [int(s.routes.valid_T.sum()) for s in SAMPLES]
    assert (used.geometry, used.provenance) == (GEOMETRY, R2)
    assert read_manifest(store, 0).geometry is None
    assert verify(store).problems == []


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[int, ...]], int, int]:
    """Draw the layers of the pipeline stages, and the numbers of data- and context-parallel
    ranks."""
    stages = draw(
        st.sampled_from([[(1, 2, 5)], [(1, 2), (5,)], [(2,), (1, 5)], [(5,), (1,), (2,)]])
    )
    return stages, draw(st.integers(1, 3)), draw(st.integers(1, 3))


@settings(max_examples=40)
@given(layouts(), st.permutations(range(len(SAMPLES))), st.booleans())
def test_routes_of_all_ranks_are_joined(layout, order, shorten):
    """Context-parallel ranks record the positions of a zigzag. If a sample is short, some ranks
    have none of its rows."""
    (stages, dp_ranks, cp_ranks), samples = layout, [SAMPLES[i] for i in order]
    if shorten:
        samples[0] = of_one_token(samples[0])
    store, new = sealed(samples)
    files = []
    for stage, layers in enumerate(stages):
        geometry = Geometry(16, 4, layers)
        for rank in range(dp_ranks * cp_ranks):
            dp_rank, cp_rank = divmod(rank, cp_ranks)
            routes, positions = {}, {}
            for sample in samples[dp_rank::dp_ranks]:
                chunks = np.array_split(np.arange(len(sample.routes.valid_T)), 2 * cp_ranks)
                at = np.concatenate([chunks[cp_rank], chunks[-1 - cp_rank]])
                mine = layers_of(sample.routes, layers)
                routes[sample.id] = Routes(mine.sets_TLK[at], mine.valid_T[at])
                positions[sample.id] = at
            cut = {"cp_rank": cp_rank, "positions": positions} if cp_ranks > 1 else {}
            files.append(write_trainer_routes(store, new, stage, dp_rank, routes, geometry, **cut))
    assert seal_trainer_routes(store, new, files, GEOMETRY).ours
    assert used_routes(store, 0).policies is None  # those of the samples are unknown
    for layers in (None, (5,), (2, 1)):
        found = read_used(store, layers)
        for sample in samples:
            assert equal(found[sample.id], layers_of(sample.routes, layers or GEOMETRY.layers))
    assert verify(store).problems == []


def test_an_audit_contains_the_routes_of_trainer_and_engine():
    store = MemoryStore()
    sealed_r3(store, SAMPLES, training=True)
    train(store, OTHERS)
    assert all(equal(read_used(store)[s.id], s.routes) for s in OTHERS)
    sealed_step = read_manifest(store, 0)
    engine = read_routes(store, sealed_step, sealed_step.ids)
    assert all(equal(engine[s.id], s.routes) for s in SAMPLES)


WRONG = {
    "nothing": ([], None),
    "a stage": ([(0, 0, (1, 2), SAMPLES)], "layers"),
    "a sample": ([(0, 0, (1, 2), SAMPLES), (1, 0, (5,), SAMPLES[1:])], SAMPLES[0].id),
    "a layer twice": ([(0, 0, (1, 2), SAMPLES), (1, 0, (2, 5), SAMPLES)], r"\[2\]"),
    "a sample twice": (
        [(0, 0, (1, 2, 5), SAMPLES[:4]), (0, 1, (1, 2, 5), SAMPLES[3:])],
        SAMPLES[3].id,
    ),
    "other valid rows": ([(0, 0, (1, 2), SAMPLES), (1, 0, (5,), OTHERS)], "some layers only"),
}


@pytest.mark.parametrize(("written", "says"), WRONG.values(), ids=WRONG)
def test_incomplete_or_contradictory_routes_are_not_sealed(written, says):
    store, new = sealed()
    files = [write_stage(store, new, *of_rank) for of_rank in written]
    with pytest.raises(TraceError, match=says):
        seal_trainer_routes(store, new, files, GEOMETRY)
    assert store.size(keys.trainer_routes(0)) is None
    assert verify(store).problems == []  # the files are debris


def test_a_position_that_no_rank_recorded_is_named():
    store, new = sealed()
    sample = SAMPLES[3]
    n = len(sample.routes.valid_T)
    files = [
        write_stage(store, new, 0, 0, GEOMETRY.layers, [s for s in SAMPLES if s is not sample])
    ]
    routes = {sample.id: Routes(sample.routes.sets_TLK[:-1], sample.routes.valid_T[:-1])}
    at = {sample.id: np.arange(n - 1)}
    files.append(write_trainer_routes(store, new, 0, 1, routes, GEOMETRY, positions=at))
    with pytest.raises(TraceError, match=f"sample {sample.id}: position {n - 1} is missing"):
        seal_trainer_routes(store, new, files, GEOMETRY)


@pytest.mark.parametrize("positions", [[0, 0], [1, 0], [-1, 0], [0, 99], [0.0, 1.0]])
def test_positions_must_be_ascending_integers(positions):
    store, new = sealed()
    id = SAMPLES[0].id
    routes = {id: Routes(SAMPLES[0].routes.sets_TLK[:2], np.ones(2, bool))}
    with pytest.raises(TraceError, match=f"sample {id}: positions"):
        write_trainer_routes(
            store, new, 0, 0, routes, GEOMETRY, positions={id: np.array(positions)}
        )
    assert not list(store.list(keys.trainings(0)))


def test_a_step_has_one_recording_and_the_first_stays():
    """A restart with a different layout writes debris and uses the step's routes."""
    store = MemoryStore()
    sealed_r2(store, SAMPLES)
    before = store.read(keys.trainer_routes(0))
    new = NewTrainerRoutes(read_manifest(store, 0), R2)
    file = write_stage(store, new, 0, 0, GEOMETRY.layers, OTHERS)
    assert not seal_trainer_routes(store, new, [file], GEOMETRY).ours
    assert store.read(keys.trainer_routes(0)) == before
    assert all(equal(read_used(store)[s.id], s.routes) for s in SAMPLES)
    assert verify(store).problems == []


def test_routes_of_another_step_or_run_are_refused():
    """The other run has the same ids and lengths."""
    (store, new), other = sealed(), MemoryStore()
    sealed_r2(other, [replace(SAMPLES[0], seed=7), *SAMPLES[1:]])
    store.create(keys.trainer_routes(0), other.read(keys.trainer_routes(0)))
    with pytest.raises(TraceError, match=keys.trainer_routes(0)):
        used_routes(store, 0)
    foreign = replace(new, manifest=replace(new.manifest, sha256="0" * 64))
    with pytest.raises(TraceError, match=keys.manifest(0)):
        seal_trainer_routes(store, foreign, [], GEOMETRY)


def test_routes_are_recorded_only_for_steps_that_expect_them():
    store = MemoryStore()
    manifest = sealed_r3(store, SAMPLES)
    with pytest.raises(TraceError, match="the trainer records no routes"):
        NewTrainerRoutes(manifest, R2)
    with pytest.raises(TraceError, match="kind R3"):
        NewTrainerRoutes(replace(manifest, training=True), replace(R2, kind="R3"))
    other = MemoryStore()
    sealed_r2(other, SAMPLES)
    store.create(keys.trainer_routes(0), other.read(keys.trainer_routes(0)))
    assert used_routes(store, 0).provenance.kind == "R3"
    assert [problem.key for problem in verify(store).problems] == [keys.trainer_routes(0)]


def test_a_step_awaits_its_routes_until_it_is_trained():
    """Then they are lost if they are not there."""
    store, new = sealed()
    write_stage(store, new, 0, 0, STAGES[0][1], SAMPLES)
    with pytest.raises(TraceError, match="not recorded yet"):
        used_routes(store, 0)
    assert verify(store).problems == []
    commit(store, keys.metrics(0), {"step": 0, "metrics": {}}, "a")
    assert [problem.key for problem in verify(store).problems] == [keys.trainer_routes(0)]


TWICE = Routes(SAMPLES[0].routes.sets_TLK * 0, np.ones_like(SAMPLES[0].routes.valid_T))


def test_malformed_arguments_leave_no_file():
    store, new = sealed()
    arguments = {"stage": 0, "dp_rank": 0, "routes": {}, "geometry": GEOMETRY}
    for changes, says in (
        ({"stage": 1_000}, "stage: 1000"),
        ({"cp_rank": -1}, "cp_rank: -1"),
        ({"new": replace(new, id="x")}, "write id"),
        ({"new": replace(new, provenance=replace(R2, policy_version=-1))}, "policy version"),
        ({"routes": {"000000/9/0": SAMPLES[0].routes}}, "000000/9/0"),
        ({"routes": {"000000/0/0": None}}, "000000/0/0: no routes"),
        ({"routes": {"000000/0/0": SAMPLES[1].routes}}, "000000/0/0: routes of shape"),
        ({"routes": {"000000/0/0": TWICE}}, "000000/0/0: .*twice"),
    ):
        with pytest.raises(TraceError, match=says):
            write_trainer_routes(store, **{"new": new, **arguments, **changes})
    assert not list(store.list(keys.trainings(0)))
