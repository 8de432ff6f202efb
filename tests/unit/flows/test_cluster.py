"""The report that the flow on Kubernetes shows in Prefect's UI."""

import pytest

from pipeline.config.tree import RunConfig
from pipeline.flows.cluster import _report
from pipeline.inputs.stage import StagedRun
from pipeline.run import keys
from pipeline.run.commit import commit, new_write_id
from tests.memory_store import MemoryStore


def test_the_report_names_the_run_and_the_location_of_its_data(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    store = MemoryStore()
    metrics = {"critic/rewards/mean": 0.25}
    commit(store, keys.metrics(0), {"step": 0, "metrics": metrics}, new_write_id())
    config = RunConfig.model_validate(
        {
            "data": {"train_files": "t.parquet"},
            "actor_rollout_ref": {"model": {"path": "m"}},
            "trainer": {"experiment_name": "first", "total_training_steps": 3},
            "store": {"uri": "memory://"},
        }
    )
    run = StagedRun("first", store.uri, store, config, {}, None, 1, 0, ())
    lines = _report(config, run).splitlines()
    assert lines[:2] == ["# Run first", "1 of 3 steps are finished."]
    assert "reward   0.250 in step 0, 0.250 in the last" in lines
    assert f"retrace traces ls {store.uri}" in lines
