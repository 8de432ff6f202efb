"""The chart's pods, and those that the launcher and Prefect create from its templates."""

import asyncio
import json
import re
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import Flow, FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

from pipeline.launch.kubernetes.cluster import read_cluster
from tests.unit.chart.objects import (
    CI,
    STORE,
    cluster_of,
    containers_of,
    pods_of,
    restricted_problems,
    template_of,
    values_of,
)


@pytest.mark.parametrize("values", CI, ids=lambda path: path.name)
def test_pods_are_restricted_and_bounded(render, values):
    for name, pod in pods_of(render("--values", values)).items():
        assert restricted_problems(pod) == [], name
        assert pod["enableServiceLinks"] is False, name
        for container in containers_of(pod):
            where = f"{name}: {container['name']}"
            assert container["securityContext"]["readOnlyRootFilesystem"] is True, where
            assert container["resources"]["limits"]["memory"], where
            assert container["resources"]["requests"]["cpu"], where
            mounts = {mount["name"] for mount in container["volumeMounts"]}
            assert mounts <= {volume["name"] for volume in pod["volumes"]}, where
            assert "/tmp" in {mount["mountPath"] for mount in container["volumeMounts"]}, where


def test_restricted_problems_are_found(render):
    pod = pods_of(render(*STORE))["rollout"]
    pod["volumes"].append({"name": "disk", "hostPath": {"path": "/"}})
    pod["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    assert restricted_problems(pod) == ["volume hostPath", "rollout: privileges"]


def test_gpu_values_reach_the_pods(render):
    cluster = cluster_of(render(*values_of("gpu")))
    assert cluster["namespace"] == "runs"
    assert cluster["instance"] == "retrace"
    assert cluster["storeUri"] == "s3://example-runs/retrace"
    assert cluster["gpuResource"] == "nvidia.com/gpu"
    assert cluster["jobs"] == {
        "ttlSecondsAfterFinished": 86400,
        "activeDeadlineSeconds": 2592000,
        "queueName": "training",
        "labels": {"team": "research"},
    }
    assert (cluster["rollout"]["gpus"], cluster["training"]["gpus"]) == (4, 8)
    for part, digit in (("rollout", "2"), ("training", "3")):
        pod = cluster[part]["template"]["spec"]
        (container,) = pod["containers"]
        assert container["name"] == part
        assert container["image"] == f"registry.example.org/retrace/{part}@sha256:{digit * 64}"
        assert pod["tolerations"] == [
            {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        ]
        assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
        assert pod["imagePullSecrets"] == [{"name": "registry"}]
        assert pod["serviceAccountName"] == "retrace-job"
        assert pod["automountServiceAccountToken"] is False
        # The launcher adds the GPUs, according to the run's parallel layout.
        assert set(container["resources"]["requests"]) == {"cpu", "memory"}
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    training = cluster["training"]["template"]
    assert training["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": "infiniband"}
    assert training["spec"]["priorityClassName"] == "training-high"
    assert training["spec"]["topologySpreadConstraints"][0]["maxSkew"] == 1
    shm = next(v for v in training["spec"]["volumes"] if v["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}


def test_the_launcher_reads_the_charts_cluster_file(render, tmp_path, monkeypatch):
    objects = render(*values_of("trial"))
    file = tmp_path / "cluster.yaml"
    file.write_text(objects["ConfigMap", "retrace-cluster"]["data"]["cluster.yaml"])
    monkeypatch.setenv("RETRACE_CLUSTER", str(file))
    cluster = read_cluster()
    assert cluster.store_uri == "s3://retrace/runs"
    assert cluster.gpu_resource == ""
    assert cluster.jobs.deadline_s == 2_592_000
    assert cluster.rollout.gpus is None
    container = cluster.training.template["spec"]["containers"][0]
    assert container["image"] == "docker.io/retrace/training:test"


def test_hooks_send_the_pods_of_runs_to_the_api_server(render):
    """Each hook is a Deployment with zero replicas and the pod template that runs will use."""
    objects = render(*values_of("gpu"))
    pods = pods_of(objects)
    for part in ("rollout", "training", "flow"):
        check = objects["Deployment", f"retrace-check-{part}"]
        assert check["spec"]["replicas"] == 0
        assert check["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
        shown = pods[f"retrace-check-{part}"]
        for key in ("volumes", "tolerations", "affinity", "nodeSelector", "imagePullSecrets"):
            assert shown.get(key) == pods[part].get(key), (part, key)
        assert shown["containers"][0]["volumeMounts"] == pods[part]["containers"][0]["volumeMounts"]


def test_web_identity_needs_no_credentials(render):
    objects = render(*values_of("gpu"))
    role = "eks.amazonaws.com/role-arn"
    for account, ends in (("job", "retrace-workers"), ("flow", "retrace-flow")):
        body = objects["ServiceAccount", f"retrace-{account}"]
        assert body["metadata"]["annotations"][role].endswith(ends)
    assert not any(kind == "Secret" for kind, _ in objects)
    for name in ("rollout", "training", "flow"):
        sources = pods_of(objects)[name]["containers"][0]["envFrom"]
        assert not any("secretRef" in source for source in sources), name
    store = objects["ConfigMap", "retrace-store"]["data"]
    assert store == {"AWS_REGION": "eu-central-1"}


def test_every_pod_of_a_run_has_the_same_store_settings(render):
    objects = render(*values_of("external"))
    assert objects["ConfigMap", "retrace-store"]["data"] == {
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": "https://s3.example.org:9443",
        "RETRACE_S3_PATH_STYLE": "true",
        "AWS_CA_BUNDLE": "/etc/retrace/ca/ca.crt",
    }
    for name in ("rollout", "training", "flow", "retrace-test"):
        pod = pods_of(objects)[name]
        (container,) = pod["containers"]
        assert {"configMapRef": {"name": "retrace-store"}} in container["envFrom"], name
        assert {"secretRef": {"name": "store-credentials"}} in container["envFrom"], name
        assert "/etc/retrace/ca" in {m["mountPath"] for m in container["volumeMounts"]}, name


def test_flow_jobs_restart_their_pod_and_never_run_two_pods(render):
    job = template_of(render(*values_of("gpu")))["job_configuration"]["job_manifest"]
    assert job["spec"]["backoffLimit"] == 3
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    (rule,) = job["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "Ignore", "draining a node must not count as a failure"
    assert rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["metadata"]["generateName"] == "{{ name }}-"
    pod = job["spec"]["template"]["spec"]
    # prefect-kubernetes reads these from the pod's spec.
    assert (pod["parallelism"], pod["completions"]) == (1, 1)
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] == 10
    assert pod["serviceAccountName"] == "retrace-flow"
    (container,) = pod["containers"]
    assert container["image"] == "{{ image }}"
    assert [item["name"] for item in container["env"]] == ["HF_TOKEN"]


def test_pods_get_network_devices_and_capabilities(render):
    amounts = {"rdma/hca": "1", "vpc.amazonaws.com/efa": "4", "hugepages-2Mi": "5120Mi"}
    wanted = {
        "runAsUser": 0,
        "capabilities": ["IPC_LOCK"],
        "resources": {"requests": amounts, "limits": amounts},
    }
    rendered = render(*STORE, "--set-json", f"training={json.dumps(wanted)}")
    cluster = cluster_of(rendered)
    pod = cluster["training"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"]) == (
        0,
        False,
    )
    for part in ("requests", "limits"):
        assert container["resources"][part].items() >= amounts.items()
    other = cluster["rollout"]["template"]["spec"]
    assert other["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_prefect_creates_the_flow_job_from_the_template(render, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", "http://server/api")
    template = template_of(render(*values_of("gpu")))
    variables = template["variables"]["properties"]
    used = set(re.findall(r"{{ (\w+) }}", json.dumps(template["job_configuration"])))
    assert used == set(variables)
    values = {"image": "retrace/flow:other", "env": {"SOME": "text"}}
    # The template refers to no block, so no server is needed.
    making = KubernetesWorkerJobConfiguration.from_template_and_values(
        template, values, client=object()
    )
    job = asyncio.run(making)
    run = FlowRun(id=uuid4(), flow_id=uuid4(), name="first", deployment_id=None)
    job.prepare_for_flow_run(run, flow=Flow(id=run.flow_id, name="retrace"))
    pod = job.job_manifest["spec"]["template"]
    # Network policies select pods by these labels, which also identify the pod's run.
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "flow"
    assert pod["metadata"]["labels"]["app.kubernetes.io/instance"] == "retrace"
    assert pod["metadata"]["labels"]["prefect.io/flow-run-id"] == str(run.id)
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "retrace/flow:other"
    assert container["args"] == ["prefect", "flow-run", "execute"]
    assert container["resources"]["limits"] == {"memory": "1Gi"}
    environment = {item["name"]: item for item in container["env"]}
    assert environment["SOME"]["value"] == "text"
    assert environment["PREFECT__FLOW_RUN_ID"]["value"] == str(run.id)
    assert environment["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "hugging-face"
    assert {"configMapRef": {"name": "retrace-env"}} in container["envFrom"]
