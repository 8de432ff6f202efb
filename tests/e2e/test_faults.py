"""Every part of a run is killed while it works; the run completes, and verifies."""

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
# One answer at a time, one question a shard, and one answer a micro-batch: rollouts and updates
# take seconds, so that a pod can be killed in the middle.
SLOW = (
    *SMALL,
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.max_num_seqs=1",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    "launch.rollout_shards=8",
)

# The kernel's OOM killer takes PID 1, which no signal from inside of its container can end: this is
# how a pod dies by SIGKILL on any cluster. Many processes hold the memory, each less than PID 1.
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
    """Of every worker pod that runs: uid of its Job, its own, and restarts of its container."""
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
    """What `kubectl drain` does to each pod of a node."""
    path = f"/api/v1/namespaces/{namespace.name}/pods/{pod}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    namespace.kubectl("create", "--raw", path, "--filename", "-", stdin=json.dumps(body))


@pytest.mark.timeout(1500)
def test_every_part_killed_in_turn(installed: Installation, prefect: Prefect, s3: dict[str, str]):
    """A rollout pod in mid-step, a training rank in mid-update, a training pod by a drain, the flow
    pod by SIGTERM and by SIGKILL, the server. The first three are made anew; the workers do not
    notice the rest."""
    namespace = installed.namespace
    run = prefect.start("faults", SLOW, steps=STEPS)
    store = open_store(f"{RUNS}/faults")
    with never_two_at_once(installed, run) as two_at_once:
        # A rollout pod, lost with all grace denied.
        wait_for(store, keys.metrics(0), run)
        pod = next(
            p["metadata"]["name"]
            for p in installed.pods(run, "rollout")
            if p["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] == "1"
        )
        wait_for(store, keys.plan(1), run)
        namespace.kubectl("delete", "pod", pod, "--grace-period=0", "--force")
        assert store.size(keys.rollout(1, 7)) is None, "killed too late to test anything"

        # A training rank: SIGKILL of the process below torchrun's agent.
        wait_for(store, keys.manifest(2), run)
        pod = live_pods(installed.pods(run, "training"))[-1]
        kill_rank = "import psutil\nfor rank in psutil.Process(1).children(): rank.kill()"
        namespace.kubectl("exec", pod, "--container", "training", "--", "python", "-c", kill_rank)
        assert store.size(keys.metrics(2)) is None, "killed too late to test anything"
        run.says(f"(pod {pod}) failed: exit code")
        run.says("making the next one: restart 1 of 3")

        # A training pod, as `kubectl drain` does it: no fault of the run, so no restart is counted.
        wait_for(store, keys.manifest(3), run)
        evict(namespace, live_pods(installed.pods(run, "training"))[-1])
        run.says("is taken away: Eviction API")
        run.says("making the next one: a disruption does not count")

        # The flow pod, by SIGTERM and, as soon as it is back, by SIGKILL.
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

        # The server's container.
        wait_for(store, keys.plan(len(all_metrics(store)) + 1), run)
        assert starts(installed, run) == workers
        [pod] = live_pods(namespace.get("pods", "app.kubernetes.io/component=server"))
        kill_by_oom(namespace, pod, "server")
        run.completes()
        assert uids(namespace.get("jobs", f"prefect.io/flow-run-id={run.id}")) == flow_jobs
    assert not two_at_once
    assert {job for job, _, _ in workers} <= uids(installed.jobs(run))
    assert len(all_metrics(store)) == STEPS
    ids = [sample for step in range(STEPS) for sample in read_manifest(store, step).ids]
    assert len(ids) == len(set(ids)) == STEPS * 8 * 8
    command("traces", "verify", store.uri)
