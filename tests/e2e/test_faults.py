"""A run completes with correct traces, even though each of its parts is killed in turn."""

import contextlib
import json

import pytest

from pipeline.report.run_metrics import all_metrics
from pipeline.run import keys
from pipeline.store import Store, open_store
from pipeline.traces import read_manifest
from tests.e2e.conftest import RUNS
from tests.e2e.installation import Installation, live_pods
from tests.e2e.kubectl import CommandError, Namespace, Object
from tests.e2e.prefect_api import SMALL, FlowRun, Prefect
from tests.e2e.watching import never_two_at_once
from tests.integration.run.retrace_runs import command
from tests.patience import eventually

STEPS = 12
# With one response at a time, one prompt per shard and one response per micro-batch, rollouts and
# updates take seconds, so that the test can kill a pod in the middle of a rollout or an update.
SLOW = (
    *SMALL,
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.max_num_seqs=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "launch.rollout_shards=8",
)

# No signal from inside a container can end its PID 1, but the kernel's OOM killer can. A pod can
# therefore be killed with SIGKILL on any cluster. The memory is taken by many processes, so that
# each of them holds less than PID 1.
KILL_PID_1 = """
import os, time
open("/proc/1/oom_score_adj", "w").write("1000")
while os.fork():
    time.sleep(0.01)
hold = b"x" * (16 << 20)
time.sleep(60)
"""


def wait_for(store: Store, key: str, run: FlowRun) -> None:
    eventually(
        lambda: run.at_work() and store.size(key) is not None,
        lambda: f"{run.name}/{key}: {run.describe()}",
        within_s=600,
    )


def uids(objects: list[Object]) -> set[str]:
    return {found["metadata"]["uid"] for found in objects}


def starts(installed: Installation, run: FlowRun) -> set[tuple[str, str, int]]:
    """Return (Job uid, pod uid, container restarts) for each running worker pod."""
    return {
        (job["metadata"]["uid"], pod["metadata"]["uid"], status["restartCount"])
        for job in installed.jobs(run)
        for component in ("rollout", "training")
        for pod in installed.pods(run, component)
        if pod["metadata"]["labels"]["job-name"] == job["metadata"]["name"]
        for status in pod["status"].get("containerStatuses", [])
        if "running" in status["state"]
    }


def kill_by_oom(namespace: Namespace, pod: str, container: str) -> None:
    with contextlib.suppress(CommandError):  # the connection ends with the container
        line = ("exec", pod, "--container", container, "--", "python", "-c", KILL_PID_1)
        namespace.kubectl(*line)


def evict(namespace: Namespace, pod: str) -> None:
    """Evict a pod, as `kubectl drain` does with each pod on a node."""
    path = f"/api/v1/namespaces/{namespace.name}/pods/{pod}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    namespace.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(body))


@pytest.mark.timeout(1500)
def test_a_run_survives_the_death_of_each_part_in_turn(
    installed: Installation, prefect: Prefect, s3: dict[str, str]
):
    """A run completes after the deaths of its workers, its flow pod and the Prefect server.

    The test kills a rollout pod within a step and a training rank within an update, and evicts a
    training pod. The launcher replaces these workers. The test then ends the flow pod, first with
    SIGTERM, then with SIGKILL, and kills the server. Meanwhile, the workers continue.
    """
    namespace = installed.namespace
    run = prefect.start("faults", SLOW, steps=STEPS)
    store = open_store(f"{RUNS}/faults")
    with never_two_at_once(installed, run) as two_at_once:
        # Delete a rollout pod without a grace period.
        wait_for(store, keys.metrics(0), run)
        pod = next(
            p["metadata"]["name"]
            for p in installed.pods(run, "rollout")
            if p["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == "1"
        )
        wait_for(store, keys.plan(1), run)
        namespace.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
        assert store.size(keys.rollout(1, 7)) is None, "killed after the end of the rollout"

        # Kill a training rank: send SIGKILL to the process below torchrun's agent.
        wait_for(store, keys.manifest(2), run)
        pod = live_pods(installed.pods(run, "training"))[-1]
        kill_rank = "import psutil\nfor rank in psutil.Process(1).children(): rank.kill()"
        namespace.kubectl("exec", pod, "--container", "training", "--", "python", "-c", kill_rank)
        assert store.size(keys.metrics(2)) is None, "killed after the end of the step"
        run.says(f"(pod {pod}) failed: exit code")
        run.says("creating the next one: restart 1 of 3")

        # Evict a training pod. An eviction does not count as a restart, because it is not the run's
        # fault. The launcher reports it for the running pod or, if the container has already ended,
        # for the failed pod.
        wait_for(store, keys.manifest(3), run)
        evict(namespace, live_pods(installed.pods(run, "training"))[-1])
        run.says("Eviction API: evict")
        run.says("creating the next one: a disruption does not count")

        # End the flow pod with SIGTERM and, as soon as its successor runs, the successor with
        # SIGKILL.
        wait_for(store, keys.plan(4), run)
        workers = starts(installed, run)
        assert len(workers) == 4
        flow_jobs = uids(namespace.get("jobs", f"prefect.io/flow-run-id={run.id}"))
        [pod] = live_pods(installed.flow_pods(run))
        namespace.kubectl("delete", "pod", pod, "--wait=false")
        run.says("start 2 of flow run")
        [pod] = live_pods(installed.flow_pods(run))
        kill_by_oom(namespace, pod, "prefect-job")
        run.says("start 3 of flow run")

        # Kill the server's container.
        wait_for(store, keys.plan(len(all_metrics(store)) + 1), run)
        assert starts(installed, run) == workers
        [pod] = live_pods(namespace.get("pods", "app.kubernetes.io/component=server"))
        installed.check_server_log()
        kill_by_oom(namespace, pod, "server")
        run.completes()
        assert uids(namespace.get("jobs", f"prefect.io/flow-run-id={run.id}")) == flow_jobs
    assert not two_at_once
    assert {job for job, _, _ in workers} <= uids(installed.jobs(run))
    assert len(all_metrics(store)) == STEPS
    ids = [sample for step in range(STEPS) for sample in read_manifest(store, step).ids]
    assert len(ids) == len(set(ids)) == STEPS * 8 * 8
    command("traces", "verify", store.uri)
