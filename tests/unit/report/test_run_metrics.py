"""Metrics of a run, read from its store."""

from pathlib import Path

import pytest

from pipeline.report.run_metrics import StepMetrics, Validation, all_metrics, read_validation
from pipeline.report.tables import closing_table
from pipeline.run import keys
from pipeline.run.commit import CorruptObjectError, commit
from pipeline.run.plan import publish_plan
from pipeline.store import open_store
from tests.samples import make_validation_plan
from tests.unit.report.values import VALUES, text_of


def test_metrics_are_read_up_to_the_first_unfinished_step(tmp_path: Path):
    store = open_store(str(tmp_path))
    for step in range(2):
        commit(store, keys.metrics(step), {"step": step, "metrics": {"a": step}}, "aaaaaaaa")
    assert [(m.step, m.values) for m in all_metrics(store)] == [(0, {"a": 0}), (1, {"a": 1})]


def test_lost_metrics_are_named(tmp_path: Path):
    """Otherwise, the metrics after a gap would be left out silently."""
    store = open_store(str(tmp_path))
    for step in (0, 2):
        commit(store, keys.metrics(step), {"step": step, "metrics": {}}, "aaaaaaaa")
    lost = r"steps/000001/metrics\.json in .*no such object.*steps/000002/metrics\.json"
    with pytest.raises(CorruptObjectError, match=lost):
        all_metrics(store)


def test_metrics_of_another_step_are_refused(tmp_path: Path):
    """Two steps' metrics were exchanged, so both still agree with their own digests."""
    store = open_store(str(tmp_path))
    for step in range(2):
        commit(store, keys.metrics(step), {"step": 1 - step, "metrics": {}}, "aaaaaaaa")
    with pytest.raises(CorruptObjectError, match=r"metrics\.json in .*the commit of .*'step': 1"):
        all_metrics(store)


@pytest.mark.parametrize("place", [{"version": 1, "shard": 0}, {"version": 0, "shard": 1}])
def test_a_validation_shard_under_the_wrong_key_is_refused(tmp_path: Path, place):
    store = open_store(str(tmp_path))
    publish_plan(store, make_validation_plan())
    body = {**place, "reward_sum": 1.0, "count": 1, "masked": 0}
    commit(store, keys.validation(0, 0), body, "aaaaaaaa")
    with pytest.raises(CorruptObjectError, match=r"00000\.json in .*this is the commit of"):
        read_validation(store, 0)


def test_a_validation_is_complete_with_all_its_shards(tmp_path: Path):
    store = open_store(str(tmp_path))
    assert read_validation(store, 4) is None
    publish_plan(store, make_validation_plan(version=4))
    commit(
        store,
        keys.validation(4, 0),
        {"version": 4, "shard": 0, "reward_sum": 3.0, "count": 4, "masked": 0},
        "aaaaaaaa",
    )
    assert read_validation(store, 4) is None
    commit(
        store,
        keys.validation(4, 1),
        {"version": 4, "shard": 1, "reward_sum": 0.0, "count": 2, "masked": 1},
        "aaaaaaaa",
    )
    assert read_validation(store, 4) == Validation(4, 6, 0.5, 2)


def test_a_validation_with_only_masked_samples_is_complete(tmp_path: Path):
    store = open_store(str(tmp_path))
    publish_plan(store, make_validation_plan())
    for shard in range(2):
        body = {"version": 0, "shard": shard, "reward_sum": 0, "count": 0, "masked": 3}
        commit(store, keys.validation(0, shard), body, "aaaaaaaa")
    assert read_validation(store, 0) == Validation(0, 0, None, 2)
    assert "—" in text_of(closing_table([StepMetrics(0, VALUES)], {0: None})).splitlines()[-2]


def sources(sums: object) -> dict[str, object]:
    return {"sources": {"gsm8k": {"reward": sums}}}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("count", value) for value in (None, "1", -1, 0.5, ...)),
        ("masked", True),
        *(("reward_sum", value) for value in ([1], {"x": 1}, ...)),
        *(("maker", sources(value)) for value in (None, [1], ["1", 2], [1, -1], {})),
    ],
    ids=repr,
)
def test_a_validation_with_invalid_numbers_is_refused(tmp_path: Path, name, value):
    """The value `...` stands for a missing key."""
    store = open_store(str(tmp_path))
    publish_plan(store, make_validation_plan())
    body = {"reward_sum": 1.5, "count": 2, "masked": 0, name: value}
    for shard in range(2):
        stored = {key: one for key, one in body.items() if one is not ...}
        stored |= {"version": 0, "shard": shard}
        commit(store, keys.validation(0, shard), stored, "aaaaaaaa")
    with pytest.raises(CorruptObjectError, match=f"{keys.validation(0, 0)} in .*{name}"):
        read_validation(store, 0)


@pytest.mark.parametrize("value", [None, [], "x", {"a": "1"}, {"a": True}, {"a": [1]}, {"a": {}}])
def test_metrics_with_invalid_numbers_are_refused(tmp_path: Path, value):
    store = open_store(str(tmp_path))
    commit(store, keys.metrics(0), {"step": 0, "metrics": value}, "aaaaaaaa")
    with pytest.raises(CorruptObjectError, match=f"{keys.metrics(0)} in .*metrics"):
        all_metrics(store)


def test_a_metric_may_have_the_value_none(tmp_path: Path):
    store = open_store(str(tmp_path))
    commit(store, keys.metrics(0), {"step": 0, "metrics": {"a": None, "b": 1}}, "aaaaaaaa")
    assert all_metrics(store) == [StepMetrics(0, {"a": None, "b": 1.0})]
