"""Metrics of a run, as they stand in its store."""

from pathlib import Path

from pipeline.report.run_metrics import StepMetrics, Validation, all_metrics, read_validation
from pipeline.report.tables import closing_table
from pipeline.run import keys
from pipeline.run.commit import commit
from pipeline.run.plan import publish_plan
from pipeline.store import open_store
from tests.samples import make_validation_plan
from tests.unit.report.values import VALUES, text_of


def test_metrics_are_read_up_to_the_first_unfinished_step(tmp_path: Path):
    store = open_store(str(tmp_path))
    for step in (0, 1, 3):
        commit(store, keys.metrics(step), {"metrics": {"a": step}}, "aaaaaaaa")
    assert [(m.step, m.values) for m in all_metrics(store)] == [(0, {"a": 0}), (1, {"a": 1})]


def test_a_validation_is_known_when_all_its_shards_are(tmp_path: Path):
    store = open_store(str(tmp_path))
    assert read_validation(store, 4) is None
    publish_plan(store, make_validation_plan(version=4))
    commit(store, keys.validation(4, 0), {"reward_sum": 3.0, "count": 4}, "aaaaaaaa")
    assert read_validation(store, 4) is None
    commit(store, keys.validation(4, 1), {"reward_sum": 0.0, "count": 2}, "aaaaaaaa")
    assert read_validation(store, 4) == Validation(4, 6, 0.5)


def test_a_validation_whose_samples_are_all_masked_is_not_a_missing_one(tmp_path: Path):
    store = open_store(str(tmp_path))
    publish_plan(store, make_validation_plan())
    for shard in range(2):
        commit(store, keys.validation(0, shard), {"reward_sum": 0, "count": 0}, "aaaaaaaa")
    assert read_validation(store, 0) == Validation(0, 0, None)
    assert "—" in text_of(closing_table([StepMetrics(0, VALUES)], {0: None})).splitlines()[-2]
