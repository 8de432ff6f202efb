"""The bodies of a run's Jobs, and the states read from pods and Jobs."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.tree import RunConfig
from pipeline.launch.kubernetes import names
from pipeline.launch.kubernetes.cluster import Cluster, Component, JobRules
from pipeline.launch.kubernetes.jobs import (
    ClusterLaunch,
    rollout_job,
    training_job,
    training_service,
)
from pipeline.launch.kubernetes.pods import Phase, read_pod
from pipeline.launch.kubernetes.watch import read_jobs, state_text
from pipeline.run.attempts import attempt_of

URI = "s3://retrace/runs/quickstart"


def template(container: str) -> dict:
    return {
        "metadata": {"labels": {"team": "rl"}},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [
                {
                    "name": container,
                    "image": f"retrace/{container}:1",
                    "env": [{"name": "HOME", "value": "/tmp"}],
                    "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi"}},
                }
            ],
        },
    }


def launch(
    gpu_resource: str = "nvidia.com/gpu", queue: str = "", **settings: dict
) -> ClusterLaunch:
    cluster = Cluster(
        namespace="retrace",
        instance="retrace",
        store_uri="s3://retrace/runs",
        gpu_resource=gpu_resource,
        jobs=JobRules(3600, 86400, queue, {"cost-centre": "7"}),
        rollout=Component(None, template("rollout")),
        training=Component(None, template("training")),
    )
    sections: dict = {
        "data": {"train_files": "t.parquet"},
        "actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"tensor_model_parallel_size": 2}},
        "trainer": {"experiment_name": "quickstart", "nnodes": 2, "n_gpus_per_node": 8},
        "launch": {"rollout_workers": 4, "max_restarts": 2},
        "store": {"uri": "s3://retrace/runs", "region": "eu-north-1"},
    }
    config = RunConfig.model_validate(sections | settings)
    return ClusterLaunch(cluster, config, URI, attempt_of(config, 3), "0b5f")


def container(job: dict) -> dict:
    [found] = job["spec"]["template"]["spec"]["containers"]
    return found


def test_each_index_of_the_rollout_job_is_a_worker():
    """Each worker restarts independently, and has as many GPUs as the engine's tensor-parallel
    size."""
    job = rollout_job(launch())
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["backoffLimitPerIndex"]) == (4, 4, 2)
    assert job["metadata"]["name"].startswith("quickstart-")
    assert job["metadata"]["name"].endswith("-3-rollout")
    command = " ".join(container(job)["command"])
    assert f"--run-uri {URI} --worker $(JOB_COMPLETION_INDEX) --attempt 3" in command
    resources = container(job)["resources"]
    assert resources["requests"] == {"cpu": "1", "nvidia.com/gpu": "2"}
    assert resources["limits"] == {"memory": "4Gi", "nvidia.com/gpu": "2"}
    rules = spec["podFailurePolicy"]["rules"]
    assert rules[0] == {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [78]}}
    assert rules[1]["action"] == "Ignore"
    assert {"name": "AWS_REGION", "value": "eu-north-1"} in container(job)["env"]


def test_a_training_gang_has_one_pod_per_node():
    """torchrun's agents meet at node 0's host name in the gang's Service."""
    made = launch()
    job = training_job(made, gang=1, restarts=1)
    name = job["metadata"]["name"]
    assert name.endswith("-3-train-1")
    assert names.gang_of(name) == 1
    assert job["metadata"]["annotations"][names.RESTARTS] == "1"
    assert (job["spec"]["completions"], job["spec"]["backoffLimit"]) == (2, 0)
    [rule] = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["spec"]["template"]["spec"]["subdomain"] == name
    command = " ".join(container(job)["command"])
    assert f"--master-addr {name}-0.{name}" in command
    assert "--nnodes 2 " in command
    assert "--nproc-per-node 8 " in command
    assert container(job)["resources"]["limits"]["nvidia.com/gpu"] == "8"
    job["metadata"]["uid"] = "1234"
    service = training_service(made, job)
    assert service["metadata"]["name"] == name
    assert service["spec"]["selector"] == {names.JOB_OF_POD: name}
    assert service["metadata"]["ownerReferences"][0]["uid"] == "1234"


def test_jobs_and_pods_get_labels_and_the_template_is_not_changed():
    made = launch(queue="gpus")
    before = copy.deepcopy(made.cluster)
    job = rollout_job(made)
    for labels in (job["metadata"]["labels"], job["spec"]["template"]["metadata"]["labels"]):
        assert labels[names.RUN] == "quickstart"
        assert labels[names.FLOW_RUN] == "0b5f"
        assert labels[names.ATTEMPT] == "3"
        assert labels["cost-centre"] == "7"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpus"
    assert job["spec"]["template"]["metadata"]["labels"]["team"] == "rl"
    assert "suspend" not in job["spec"]  # without Kueue, the Job would never be resumed
    assert made.cluster == before


def test_a_run_can_override_the_pods():
    pods = {"rollout": {"image": "mine:2", "cpu": "8", "memory": "64Gi", "gpus": 4}}
    job = rollout_job(launch(launch={"rollout_workers": 1, "kubernetes": pods}))
    assert container(job)["image"] == "mine:2"
    amounts = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": "4"}
    assert container(job)["resources"] == {"requests": amounts, "limits": amounts}


def test_without_a_gpu_resource_pods_request_no_gpus():
    assert "nvidia.com/gpu" not in str(rollout_job(launch(gpu_resource="")))


@given(
    run=st.from_regex(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True),
    attempt=st.integers(0, 999),
    gang=st.integers(0, 99),
    node=st.integers(0, 9),
)
def test_host_names_fit(run: str, attempt: int, gang: int, node: int):
    """A pod's host name (its Job's name and its index) must fit into a DNS label: 63 characters."""
    name = names.training_job_name(run, URI, attempt, gang)
    assert len(f"{name}-{node}") <= 63
    assert names.is_of(name, run, URI)
    assert not names.is_of(name, run, "s3://other/runs/x")


def pod(phase: str, state: dict | None = None, conditions: list | None = None, **status) -> dict:
    """Return a pod in the API server's format."""
    statuses = [{"name": "rollout", "state": state, **status}] if state else []
    return {
        "metadata": {
            "name": "q-rollout-1-abcde",
            "uid": "u1",
            "labels": {
                names.JOB_OF_POD: "q-rollout",
                names.COMPONENT: "rollout",
                names.ATTEMPT: "0",
            },
            "annotations": {names.INDEX_OF_POD: "1"},
        },
        "spec": {"containers": [{"name": "rollout", "resources": {"limits": {"memory": "4Gi"}}}]},
        "status": {"phase": phase, "containerStatuses": statuses, "conditions": conditions or []},
    }


SCHEDULED = {"type": "PodScheduled", "status": "True"}
# The status of a pod whose volume exceeded its limit; it has no DisruptionTarget condition.
EVICTED = {
    "phase": "Failed",
    "reason": "Evicted",
    "message": 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi". ',
    "containerStatuses": [{"name": "rollout", "state": {"terminated": {"exitCode": 137}}}],
}


UNSCHEDULABLE = SCHEDULED | {"status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
PULLING = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling x"}}
DRAINED = {"type": "DisruptionTarget", "status": "True", "message": "Eviction API: drain"}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}


@pytest.mark.parametrize(
    ("given", "phase", "trouble"),
    [
        (pod("Pending", conditions=[UNSCHEDULABLE]), Phase.PENDING, "Unschedulable: 0/1 nodes"),
        (pod("Pending", {"waiting": {}}, [SCHEDULED]), Phase.STARTING, ""),
        (pod("Pending", PULLING, [SCHEDULED]), Phase.STARTING, "ImagePullBackOff: Back-off"),
        (pod("Running", {"running": {}}, [SCHEDULED], ready=False), Phase.LOADING, ""),
        (pod("Running", {"running": {}}, [SCHEDULED], ready=True), Phase.RUNNING, ""),
        (pod("Succeeded", {"terminated": {"exitCode": 0}}), Phase.ENDED, ""),
        (pod("Failed", {"terminated": {"exitCode": 1}}), Phase.FAILED, "exit code 1"),
        (pod("Failed", KILLED), Phase.FAILED, "than its limit of 4Gi"),
        (pod("Failed", KILLED) | {"status": EVICTED}, Phase.FAILED, 'volume "tmp" exceeds'),
        (pod("Failed", {"terminated": {"exitCode": 143}}, [DRAINED]), Phase.FAILED, "API: drain"),
    ],
)
def test_the_phase_and_trouble_of_a_pod_are_read(given: dict, phase: Phase, trouble: str):
    found = read_pod(given)
    assert (found.phase, found.trouble is None) == (phase, not trouble)
    assert trouble in (found.trouble or "")
    assert found.who == "rollout worker 1 (pod q-rollout-1-abcde)"


def job(**status) -> dict:
    return {
        "metadata": {
            "name": "q-rollout",
            "labels": {names.COMPONENT: "rollout", names.ATTEMPT: "0"},
        },
        "spec": {"suspend": status.pop("suspend", False)},
        "status": status,
    }


def test_a_suspended_job_is_queued_not_failed():
    [found] = read_jobs([job(suspend=True)], [])
    assert found.queued
    assert not found.ended
    assert state_text(found).startswith("queued")


def test_a_job_has_failed_only_when_none_of_its_pods_runs():
    """The next gang must not start while a rank of the previous gang is still running."""
    failed = job(conditions=[{"type": "Failed", "status": "True", "reason": "BackoffLimit"}])
    running = read_pod(pod("Running", {"running": {}}, [SCHEDULED], ready=True))
    assert read_jobs([failed], [running])[0].failure is None
    dead = read_pod(pod("Failed", {"terminated": {"exitCode": 1}}))
    assert read_jobs([failed], [dead])[0].failure is not None


def test_the_pod_that_failed_first_comes_first():
    """Pods that were ended by SIGTERM because another pod had failed come last."""
    first = pod("Failed", {"terminated": {"exitCode": 1, "finishedAt": "2026-01-01T00:00:09Z"}})
    told = pod("Failed", {"terminated": {"exitCode": 143, "finishedAt": "2026-01-01T00:00:01Z"}})
    [found] = read_jobs([job()], [read_pod(told), read_pod(first)])
    assert [p.exit_code for p in found.failed_pods] == [1, 143]
