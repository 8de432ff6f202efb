"""A run on a cluster is started and watched through Prefect's API; `verify` accepts its traces."""

import json
import re
from pathlib import Path

from pipeline.report.run_metrics import all_metrics
from pipeline.store import Store, open_store
from tests.e2e.installation import Installation
from tests.e2e.prefect_api import FlowRun, Prefect
from tests.integration.run.retrace_runs import command, run, small
from tests.metrics import against_the_table


def test_the_helm_test_passes(installed: Installation):
    printed = installed.namespace.helm("test", installed.release, "--logs")
    assert "Phase:          Succeeded" in printed


def test_a_schedule_starts_a_run_under_its_own_name(prefect: Prefect):
    """The flow refuses the run's settings. Other tests train."""
    run = prefect.start_by_schedule(["trainer.no_such_key=1"])
    assert "trainer.no_such_key: unknown key" in run.end()["message"]
    name = prefect.call("GET", f"/flow_runs/{run.id}")["name"]
    assert re.fullmatch(rf"[a-z-]+-{run.id[-4:]}", name)


def test_traces_verify_from_this_machine(main_store: Store):
    command("traces", "verify", main_store.uri)


def test_metrics_have_the_names_of_a_local_run(main_store: Store, tmp_path: Path):
    """Every step reports the same metrics as a local run with two ranks and two workers.

    All rows are replayed.
    """
    steps = all_metrics(main_store)
    assert len(steps) == 2
    run(*small(tmp_path, "local", "launch.rollout_workers=2", "trainer.n_gpus_per_node=2"))
    local = all_metrics(open_store(f"{tmp_path}/store/local"))
    for here, there in zip(steps, local, strict=True):
        assert set(here.values) == set(there.values)
        assert against_the_table(here.values) == ([], [])
        assert {k for k, v in here.values.items() if v is None} == {
            k for k, v in there.values.items() if v is None
        }
        assert here.values["replay/coverage"] == 1.0


def test_states_and_artifacts_are_shown(main_run: FlowRun, main_store: Store):
    """The UI shows the pods' phases, the steps, the progress, the metrics and the report."""
    log = main_run.log_text()
    for text in (
        "loading the model",
        "2 running",
        "step 0 of 2",
        "step 1 of 2",
        "step 0: 32 samples",
    ):
        assert text in log, log
    artifacts = main_run.artifacts()
    assert artifacts["main-progress"]["data"] == 100.0
    rows = json.loads(artifacts["main-metrics"]["data"])
    assert [row["critic/rewards/mean"] for row in rows] == [
        step.values["critic/rewards/mean"] for step in all_metrics(main_store)
    ]
    assert main_store.uri in artifacts["main-report"]["data"]
    assert main_store.uri in artifacts["main-store"]["data"]
    body = {"flow_runs": {"id": {"any_": [main_run.id]}}}
    tasks = main_run.prefect.call("POST", "/task_runs/filter", body)
    states = {task["name"]: task["state_type"] for task in tasks}
    for name in ("rollout-0", "train-0", "rollout-1", "train-1"):
        assert states[name] == "COMPLETED"


def test_worker_pods_ran_restricted_and_without_a_token(main_run: FlowRun, installed: Installation):
    """Two pods of each kind succeeded in a namespace that enforces `restricted`.

    Their Jobs remain until their time to live expires. The pods had no credentials for Kubernetes
    or Prefect.
    """
    for component in ("rollout", "training"):
        pods = installed.pods(main_run, component)
        assert len(pods) == 2, installed.namespace.describe_trouble()
        for pod in pods:
            assert pod["status"]["phase"] == "Succeeded"
            assert pod["spec"]["automountServiceAccountToken"] is False
            [container] = pod["spec"]["containers"]
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert not [e["name"] for e in container["env"] if e["name"].startswith("PREFECT")]
    for job in installed.jobs(main_run):
        assert job["spec"]["ttlSecondsAfterFinished"] > 0
        assert [c["type"] for c in job["status"]["conditions"]][-1] == "Complete"
