"""The name of a run on Kubernetes, and the report that the flow shows in Prefect's UI."""

import pytest
from pydantic import TypeAdapter

from pipeline.config.tree import RunConfig
from pipeline.flows.cluster import RunName, _report, run_name_of
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


ID = "01a221da-1c3e-7b09-a0f3-737f02db66e0"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("crimson-otter", "crimson-otter-66e0"),
        ("My Run (2)", "my-run-2-66e0"),
        ("-a_b-", "a-b-66e0"),
        ("x66e0", "x-66e0"),
        ("66e0", "66e0"),
        ("\u5b9f\u9a13", "66e0"),
        ("a" * 60, "a" * 35 + "-66e0"),
        ("a" * 34 + "-b", "a" * 34 + "-66e0"),
    ],
)
def test_the_name_of_a_flow_run_becomes_the_name_of_a_run(name: str, expected: str):
    """A restarted flow pod, which reads the new name, computes the same name."""
    run_name = run_name_of(name, ID)
    assert run_name == expected
    assert TypeAdapter(RunName).validate_python(run_name) == run_name
    assert run_name_of(run_name, ID) == run_name
