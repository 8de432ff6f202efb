"""Cancelling in the UI ends a run's Jobs within 30 s, whatever the run is doing."""

import json
import time
from collections.abc import Iterator

import pytest

from pipeline.store import keys, open_store
from tests.e2e.conftest import RUNS
from tests.e2e.installation import Installation, live_pods
from tests.e2e.kubectl import eventually
from tests.e2e.prefect_api import NO_NODE, SINGLE, SMALL, FlowRun, Prefect

GONE_WITHIN_S = 30
NEVER_STARTS = (
    *SINGLE,
    f"launch.kubernetes.rollout.gpus={NO_NODE}",
    f"launch.kubernetes.training.gpus={NO_NODE}",
)


def cancel(installed: Installation, run: FlowRun) -> None:
    """Cancel a run, and wait until its Jobs are gone."""
    run.cancel()
    eventually(
        lambda: not installed.jobs(run), GONE_WITHIN_S, lambda: f"Jobs are left: {run.describe()}"
    )


def ends_cancelled(installed: Installation, run: FlowRun, within_s: float) -> None:
    assert run.end(within_s)["name"] == "Cancelled", run.describe()
    eventually(lambda: not live_pods(installed.flow_pods(run)), 60, lambda: "the flow pod goes on")
    assert not installed.jobs(run)


def when_jobs_exist(installed: Installation, run: FlowRun) -> None:
    eventually(lambda: run.at_work() and len(installed.jobs(run)) == 2, 200, run.describe)


def test_while_it_runs(installed: Installation, prefect: Prefect, s3: dict[str, str]):
    run = prefect.start("cancelled", [*SMALL, *SINGLE], steps=200)
    store = open_store(f"{RUNS}/cancelled")
    eventually(lambda: run.at_work() and store.size(keys.metrics(0)) is not None, 600, run.describe)
    cancel(installed, run)
    ends_cancelled(installed, run, within_s=60)
    workers = "app.kubernetes.io/managed-by=retrace,retrace.dev/run=cancelled"
    # A pod that goes has 30 s to leave vLLM or a collective call.
    eventually(lambda: not live_pods(installed.namespace.get("pods", workers)), 60, run.describe)


def test_before_it_has_a_pod(installed: Installation, prefect: Prefect):
    run = prefect.start("unstarted", NEVER_STARTS)
    run.cancel()
    ends_cancelled(installed, run, within_s=150)


def test_while_it_starts(installed: Installation, prefect: Prefect):
    run = prefect.start("starting", NEVER_STARTS)
    when_jobs_exist(installed, run)
    cancel(installed, run)
    ends_cancelled(installed, run, within_s=60)


def test_with_its_flow_pod_lost(installed: Installation, prefect: Prefect):
    """The flow Job is suspended, so its pod goes and no other comes: nobody is there to act."""
    run = prefect.start("lost", NEVER_STARTS)
    when_jobs_exist(installed, run)
    [job] = installed.namespace.get("jobs", f"prefect.io/flow-run-id={run.id}")
    suspend = json.dumps({"spec": {"suspend": True}})
    installed.namespace.kubectl("patch", "job", job["metadata"]["name"], "--patch", suspend)
    eventually(lambda: not live_pods(installed.flow_pods(run)), 60, lambda: "the flow pod goes on")
    assert len(installed.jobs(run)) == 2, "the Jobs outlive their flow pod"
    cancel(installed, run)
    ends_cancelled(installed, run, within_s=150)


@pytest.fixture
def queued(installed: Installation, prefect: Prefect) -> Iterator[FlowRun]:
    """A run whose Jobs are suspended, as Kueue does until there is room."""
    run = prefect.start("queued", [*NEVER_STARTS, "launch.start_timeout_s=15"])
    when_jobs_exist(installed, run)
    for job in installed.jobs(run):
        suspend = json.dumps({"spec": {"suspend": True}})
        installed.namespace.kubectl("patch", "job", job["metadata"]["name"], "--patch", suspend)
    yield run
    cancel(installed, run)
    ends_cancelled(installed, run, within_s=60)


def test_a_queued_run_waits(queued: FlowRun):
    """It says so, and waiting in a queue does not count as a start that takes too long."""
    queued.says("queued (Job queued-", within_s=30)
    time.sleep(20)  # longer than launch.start_timeout_s
    assert queued.state["type"] == "RUNNING", queued.describe()
