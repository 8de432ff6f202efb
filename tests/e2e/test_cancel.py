"""Cancelling a run, as the UI does, removes its Jobs within 30 s in every phase of the run."""

import json
import time
from collections.abc import Iterator

import pytest

from pipeline.run import keys
from pipeline.store import open_store
from tests.e2e.conftest import RUNS
from tests.e2e.installation import Installation, live_pods
from tests.e2e.prefect_api import NO_ROLLOUT, NO_TRAINING, SINGLE, SMALL, FlowRun, Prefect
from tests.patience import eventually

GONE_WITHIN_S = 30
NEVER_STARTS = (*SINGLE, NO_ROLLOUT, NO_TRAINING)


def cancel(installed: Installation, run: FlowRun) -> None:
    """Cancel a run, and wait until its Jobs are gone."""
    run.cancel()
    eventually(
        lambda: not installed.jobs(run), lambda: f"Jobs remain: {run.describe()}", GONE_WITHIN_S
    )


def ends_cancelled(installed: Installation, run: FlowRun) -> None:
    assert run.end()["name"] == "Cancelled", run.describe()
    eventually(lambda: not live_pods(installed.flow_pods(run)), lambda: "the flow pod still runs")
    assert not installed.jobs(run)


def when_jobs_exist(installed: Installation, run: FlowRun) -> None:
    eventually(lambda: run.at_work() and len(installed.jobs(run)) == 2, run.describe)


def test_a_live_run_can_be_cancelled(installed: Installation, prefect: Prefect, s3: dict[str, str]):
    run = prefect.start("cancelled", [*SMALL, *SINGLE], steps=200)
    store = open_store(f"{RUNS}/cancelled")
    eventually(lambda: run.at_work() and store.size(keys.metrics(0)) is not None, run.describe, 600)
    cancel(installed, run)
    ends_cancelled(installed, run)
    workers = "app.kubernetes.io/managed-by=retrace,retrace.dev/run=cancelled"
    # A terminating pod has 30 s to leave vLLM or a collective call.
    eventually(lambda: not live_pods(installed.namespace.get("pods", workers)), run.describe)


def test_a_run_without_a_pod_can_be_cancelled(installed: Installation, prefect: Prefect):
    run = prefect.start("unstarted", NEVER_STARTS)
    run.cancel()
    ends_cancelled(installed, run)


def test_a_run_whose_pods_are_starting_can_be_cancelled(installed: Installation, prefect: Prefect):
    run = prefect.start("starting", NEVER_STARTS)
    when_jobs_exist(installed, run)
    cancel(installed, run)
    ends_cancelled(installed, run)


def test_a_run_whose_flow_pod_is_lost_can_be_cancelled(installed: Installation, prefect: Prefect):
    """Suspending the flow Job removes its pod for good, so no flow is left to cancel the run."""
    run = prefect.start("lost", NEVER_STARTS)
    when_jobs_exist(installed, run)
    [job] = installed.namespace.get("jobs", f"prefect.io/flow-run-id={run.id}")
    suspend = json.dumps({"spec": {"suspend": True}})
    installed.namespace.kubectl("patch", "job", job["metadata"]["name"], "--patch", suspend)
    eventually(lambda: not live_pods(installed.flow_pods(run)), lambda: "the flow pod still runs")
    assert len(installed.jobs(run)) == 2, "the Jobs disappeared with their flow pod"
    cancel(installed, run)
    ends_cancelled(installed, run)


@pytest.fixture
def queued(installed: Installation, prefect: Prefect) -> Iterator[FlowRun]:
    """A run whose Jobs are suspended, as Kueue suspends Jobs until resources are free."""
    run = prefect.start("queued", [*NEVER_STARTS, "launch.start_timeout_s=15"])
    when_jobs_exist(installed, run)
    for job in installed.jobs(run):
        suspend = json.dumps({"spec": {"suspend": True}})
        installed.namespace.kubectl("patch", "job", job["metadata"]["name"], "--patch", suspend)
    yield run
    cancel(installed, run)
    ends_cancelled(installed, run)


def test_a_queued_run_waits_without_a_time_limit(queued: FlowRun):
    """The run's log reports the queue, and launch.start_timeout_s does not limit the wait."""
    queued.says("queued (Job queued-")
    time.sleep(20)  # longer than launch.start_timeout_s
    assert queued.state["type"] == "RUNNING", queued.describe()
