"""The janitor with a real Prefect server and a real cluster.

The tests need no image, because the Jobs are suspended or their pods match no node.
"""

import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextvars import copy_context
from uuid import uuid4

import pytest
from prefect import flow

from pipeline.installation.janitor import ALIVE, Clocks, Janitor
from pipeline.installation.register import register
from pipeline.launch.kubernetes import names
from pipeline.launch.kubernetes.api import Api
from tests.e2e.installation import new_namespace
from tests.e2e.kubectl import Namespace, why_no_cluster
from tests.integration.installation.flow_runs import FlowRuns
from tests.integration.installation.installation import Installation, start_program
from tests.patience import PATIENCE_S, eventually
from tests.prefect_server import PrefectServer

# Without a cluster, the tests are skipped before a server starts.
pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("namespace")]

GRACE_S = 900.0


@flow(name="retrace")
def stand_in(run_name: str) -> None: ...


@pytest.fixture(scope="package")
def namespace() -> Iterator[Namespace]:
    why = why_no_cluster(os.environ.get("KUBECONFIG"))
    if why is not None:
        pytest.skip(why)
    with new_namespace() as made:
        yield made


@pytest.fixture
def runs(
    installation: Installation, server: PrefectServer, namespace: Namespace
) -> Iterator[FlowRuns]:
    """Yield the flow runs of the installation's deployment; delete all Jobs afterwards."""
    installation.namespace = namespace.name
    installation.write()
    register(stand_in, PATIENCE_S)
    [found] = server.query(
        "/deployments/filter", {"work_pools": {"name": {"any_": [installation.pool]}}}
    )
    yield FlowRuns(server, found["id"])
    namespace.kubectl("delete", "jobs", "--all", "--grace-period=0", "--force")


@pytest.fixture
def janitor(installation: Installation, namespace: Namespace) -> Janitor:
    return Janitor(Api(namespace.name), "retrace", installation.pool, Clocks(GRACE_S))


def worker_job(namespace: Namespace, flow_run: str, instance: str = "retrace") -> str:
    """Create a suspended worker Job, and return its name.

    Args:
        namespace: The namespace.
        flow_run: The flow run's id.
        instance: The installation's name.
    """
    labels = {
        names.MANAGED_BY: names.RETRACE,
        names.INSTANCE: instance,
        names.FLOW_RUN: flow_run,
    }
    return make_job(namespace, labels, suspend=True)


def flow_job(namespace: Namespace, pool: str, flow_run: str, suspend: bool = False) -> str:
    """Create a flow Job with a pod that stays Pending. (A suspended Job has no pod.)

    Args:
        namespace: The namespace.
        pool: The Job's work pool.
        flow_run: The flow run's id.
        suspend: Whether to suspend the Job.

    Returns:
        The Job's name.
    """
    labels = {"prefect.io/work-pool-name": pool, names.FLOW_RUN_OF_FLOW_POD: flow_run}
    name = make_job(namespace, labels, suspend)
    selector = f"{names.FLOW_RUN_OF_FLOW_POD}={flow_run}"
    eventually(lambda: suspend or namespace.get("pods", selector), lambda: f"no pod of {name}")
    return name


def make_job(namespace: Namespace, labels: dict[str, str], suspend: bool) -> str:
    """Create a Job whose pod matches no node, and return its name.

    Args:
        namespace: The namespace.
        labels: Labels for the Job and its pod.
        suspend: Whether to suspend the Job.
    """
    name = f"job-{secrets.token_hex(4)}"
    container = {
        "name": "a",
        "image": "none",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "runAsNonRoot": True,
            "runAsUser": 10001,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    pod = {
        "restartPolicy": "Never",
        "nodeSelector": {"retrace.dev/no-node": "has-this"},
        "containers": [container],
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {"suspend": suspend, "template": {"metadata": {"labels": labels}, "spec": pod}},
    }
    namespace.kubectl("apply", "-f", "-", stdin=json.dumps(job))
    return name


def jobs(namespace: Namespace) -> set[str]:
    """Return the names of the Jobs that are not being deleted."""
    return {
        job["metadata"]["name"]
        for job in namespace.get("jobs")
        if "deletionTimestamp" not in job["metadata"]
    }


@pytest.mark.parametrize("state", ["CANCELLING", "CANCELLED"])
def test_the_jobs_of_a_cancelled_run_are_deleted_immediately(
    state: str, runs: FlowRuns, janitor: Janitor, namespace: Namespace
):
    ended, alive = runs.create(state), runs.create("RUNNING")
    for run in (ended, ended):
        worker_job(namespace, run)
    flow_job(namespace, janitor.work_pool, ended)
    kept = {
        worker_job(namespace, alive),
        worker_job(namespace, ended, instance="another"),
        flow_job(namespace, janitor.work_pool, alive),
        flow_job(namespace, "another", ended),
    }
    janitor.look(0)
    assert jobs(namespace) == kept


def test_a_pending_flow_pod_of_a_crashed_run_never_starts(
    runs: FlowRuns, janitor: Janitor, namespace: Namespace
):
    crashed, failed = runs.create("CRASHED"), runs.create("FAILED")
    flow_job(namespace, janitor.work_pool, crashed)
    kept = {flow_job(namespace, janitor.work_pool, failed)}
    janitor.look(0)
    assert jobs(namespace) == kept


def test_jobs_without_an_owner_are_deleted_after_the_grace_period(
    runs: FlowRuns, janitor: Janitor, namespace: Namespace
):
    unknown, over, attended = str(uuid4()), runs.create("COMPLETED"), runs.create("FAILED")
    running, again = runs.create("RUNNING"), runs.create("SCHEDULED", "AwaitingRetry")
    lost = runs.create("RUNNING")  # its flow Job was deleted
    for run in (unknown, over, lost, "not-an-id"):
        worker_job(namespace, run)
    kept = {
        worker_job(namespace, running),
        flow_job(namespace, janitor.work_pool, running, suspend=True),  # the time between two pods
        worker_job(namespace, again),
        flow_job(namespace, janitor.work_pool, again, suspend=True),
        worker_job(namespace, attended),
        flow_job(namespace, "elsewhere", attended),  # a live pod counts in any work pool
    }
    before = jobs(namespace)
    janitor.look(0)
    janitor.look(GRACE_S - 1)
    assert jobs(namespace) == before
    janitor.look(GRACE_S)
    assert jobs(namespace) == kept


def test_a_run_that_is_started_again_keeps_its_jobs(
    runs: FlowRuns, janitor: Janitor, namespace: Namespace
):
    run = runs.create("CRASHED")
    kept = {worker_job(namespace, run)}
    janitor.look(0)
    runs.set(run, "SCHEDULED", "AwaitingRetry")
    janitor.look(GRACE_S)
    runs.set(run, "CRASHED")
    janitor.look(GRACE_S + 1)
    janitor.look(2 * GRACE_S)
    assert jobs(namespace) == kept


def test_no_jobs_are_deleted_while_prefect_does_not_answer(
    runs: FlowRuns,
    janitor: Janitor,
    namespace: Namespace,
    server: PrefectServer,
    caplog: pytest.LogCaptureFixture,
):
    cancelled, unknown = runs.create("RUNNING"), str(uuid4())
    janitor.clocks.grace_s = 6.0
    later = worker_job(namespace, unknown)
    first = worker_job(namespace, cancelled)
    runs.set(cancelled, "CANCELLING")
    server.kill()
    stop = threading.Event()
    looking = threading.Thread(target=copy_context().run, args=(janitor.run, 0.5, stop))
    looking.start()
    try:
        eventually(lambda: "deleting no Jobs until" in caplog.text, lambda: caplog.text)
        time.sleep(10)  # longer than the grace period
        assert jobs(namespace) == {later, first}
        assert caplog.text.count("deleting no Jobs until") == 1
        server.start()
        answered_s = time.monotonic()
        eventually(lambda: first not in jobs(namespace), lambda: str(jobs(namespace)))
        eventually(lambda: later not in jobs(namespace), lambda: str(jobs(namespace)))
        # The janitor may notice slightly before this test that the server is back.
        assert time.monotonic() - answered_s > 4.0, "the clock ran while Prefect did not answer"
    finally:
        stop.set()
        looking.join()


def test_the_program_deletes_jobs_until_it_gets_sigterm(
    runs: FlowRuns, installation: Installation, namespace: Namespace
):
    worker_job(namespace, runs.create("CANCELLED"))
    ALIVE.unlink(missing_ok=True)
    installation.set("RETRACE_JANITOR_INTERVAL_S", "1")
    with start_program("pipeline.installation.janitor") as process:
        try:
            eventually(lambda: jobs(namespace) == set(), lambda: str(jobs(namespace)))
            eventually(ALIVE.exists, lambda: f"no {ALIVE}")
            process.send_signal(signal.SIGTERM)
            _, printed = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "is cancelled" in printed
