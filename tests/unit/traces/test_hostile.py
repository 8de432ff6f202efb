"""The tools of the hostile campaign detect wrong rows, unnamed damage and unexpected errors."""

import dataclasses
import json
import time

import pytest

from pipeline.run import keys
from pipeline.traces import read_samples
from tests.hostile import judge as judge_module
from tests.hostile import pool
from tests.hostile.campaign import (
    SAMPLE,
    Outcome,
    all_cases,
    sampled,
    target_of,
    way_of,
)
from tests.hostile.case import FREE, Case
from tests.hostile.judge import Placed, Verdict, judge
from tests.hostile.remake import remade
from tests.hostile.worlds import twin, world


@pytest.fixture
def placed(tmp_path) -> Placed:
    return Placed("r3", tmp_path)


def test_each_name_belongs_to_one_case_and_contains_the_level():
    cases = all_cases()
    assert len({case.name for case in cases}) == len(cases)
    assert {case.level for case in cases} == {"L0", "L1"}


def test_a_sample_of_the_cases_covers_every_way_and_every_object():
    cases = all_cases()
    chosen = [cases[number] for number in sampled(SAMPLE)]
    assert 1_000 <= len(set(chosen)) <= 1.1 * SAMPLE
    assert {way_of(case) for case in chosen} == {way_of(case) for case in cases}
    cheap = {target_of(case) for case in cases if case.family != "bombs"}
    assert cheap <= {target_of(case) for case in chosen}
    assert sampled(SAMPLE) == sampled(SAMPLE)


def test_a_twin_has_the_same_objects_with_different_content():
    for tokens in (False, True):
        routes = [key for key in world("r2") if key.endswith(".routes.parquet")]
        assert set(twin("r2", tokens)) == set(world("r2"))
        assert all(twin("r2", tokens)[key] != world("r2")[key] for key in routes)


def test_remade_digests_match():
    """Remaking an object with its original bytes restores it."""
    key = next(key for key in world("r3") if key.endswith(".samples.parquet"))
    changed = remade(world("r3"), {key: world("r3")[key] + b"x"})
    assert {name.rsplit("/", 1)[-1] for name in changed} >= {"00000.json", "manifest.json"}
    restored = remade({**world("r3"), **changed}, {key: world("r3")[key]})
    assert restored.keys() >= changed.keys()
    for name, data in restored.items():
        if name.endswith(".json"):
            assert json.loads(data) == json.loads(world("r3")[name])
        else:
            assert data == world("r3")[name]


def test_remaking_a_set_whose_commits_name_their_runs_manifest_terminates():
    """The set's manifest also names those commits, so each digest would depend on the other."""
    key = next(key for key in world("r2set") if key.endswith(".routes.parquet"))
    changed = remade(world("r2set"), {key: world("r2set")[key] + b"x"})
    assert keys.manifest(0) in changed


def test_an_undamaged_store_is_correct(placed):
    verdict = judge(Case("none/x/x/L0", "r3", dict, FREE), placed, {}, None)
    assert verdict.bad == []
    assert verdict.problems == []


def test_wrong_rows_are_detected(placed, monkeypatch):
    """Even a single wrong field in a reader's result is detected."""

    def lying(store, manifest, ids):
        found = read_samples(store, manifest, ids)
        return [dataclasses.replace(found[0], reward=0.5), *found[1:]]

    case = Case("none/x/x/L0", "r3", dict, FREE)
    judge_module.truth("r3", 0)
    monkeypatch.setattr(judge_module, "read_samples", lying)
    verdict = judge(case, placed, {}, 0)
    assert any("read_samples" in said and "reward" in said for said in verdict.wrong)


def test_unnamed_damage_is_detected(placed):
    case = Case("none/x/x/L0", "r3", dict)
    assert judge(case, placed, {}, 0).unnamed


def test_an_unexpected_error_is_detected(placed, monkeypatch):
    def broken(store, step):
        raise KeyError("reward")

    judge_module.truth("r3", 0)
    monkeypatch.setattr(judge_module, "read_manifest", broken)
    verdict = judge(Case("none/x/x/L0", "r3", dict, FREE), placed, {}, 0)
    assert any("KeyError" in said for said in verdict.tracebacks)


def test_known_cases_that_succeed_must_be_removed(monkeypatch):
    monkeypatch.setattr("tests.hostile.known.OPEN", {"^a/": "known"})
    monkeypatch.setattr("tests.hostile.campaign.OPEN", {"^a/": "known"})
    right, wrong = Verdict(), Verdict(unnamed=True)
    assert Outcome({"a/1": right, "a/2": wrong}).mended == []
    assert Outcome({"a/1": right, "a/2": wrong}).failed == {}
    assert Outcome({"a/1": right}).mended == ["^a/"]
    assert Outcome({"b/1": wrong}).failed == {"b/1": ["verify names nothing"]}


def test_the_memory_bound_is_enforced():
    with pool._bounded(), pytest.raises(MemoryError):
        bytearray((pool.MEMORY_MB + 64) << 20)


def test_a_child_is_late_by_either_clock():
    child = pool._Child.__new__(pool._Child)
    child._cpu_s, child._used_s = 3.0, lambda: 5.0
    child._given = time.monotonic()
    assert child.late(1)  # by CPU time
    assert not child.late(60)
    child._given -= 601  # waiting, which takes no CPU time
    assert child.late(60)
