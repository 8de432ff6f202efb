"""Parts of the chart's rendered manifests."""

import json

import yaml

from tests.paths import ROOT

CHART = ROOT / "charts" / "retrace"
IMAGES = ("flow", "rollout", "training")
CI = sorted(CHART.glob("ci/*-values.yaml"))
STORE = (
    "--set",
    "store.uri=s3://runs/retrace,"
    + ",".join(f"images.{name}.repository=r.example/{name}" for name in IMAGES),
)
"""The minimal values of an installation."""


def values_of(name):
    return ("--values", CHART / "ci" / f"{name}-values.yaml")


def cluster_of(objects):
    return yaml.safe_load(objects["ConfigMap", "retrace-cluster"]["data"]["cluster.yaml"])


def template_of(objects):
    text = objects["ConfigMap", "retrace-base-job-template"]["data"]["base-job-template.json"]
    return json.loads(text)


def pods_of(objects):
    """Return the chart's pod specs, keyed by name.

    They include the pods that the launcher and Prefect create.
    """
    pods = {
        name: body["spec"]["template"]["spec"]
        for (kind, name), body in objects.items()
        if kind == "Deployment"
    }
    pods |= {name: body["spec"] for (kind, name), body in objects.items() if kind == "Pod"}
    cluster = cluster_of(objects)
    pods |= {part: cluster[part]["template"]["spec"] for part in ("rollout", "training")}
    job = template_of(objects)["job_configuration"]["job_manifest"]
    return pods | {"flow": job["spec"]["template"]["spec"]}


def containers_of(pod):
    return pod.get("initContainers", []) + pod["containers"]


def restricted_problems(pod):
    """Return the fields of a pod spec that violate the Pod Security level `restricted`."""
    problems = [key for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    security = pod["securityContext"]
    if security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0:
        problems.append("may run as root")
    if security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        problems.append("seccompProfile")
    allowed = {"configMap", "emptyDir", "persistentVolumeClaim", "projected", "secret", "csi"}
    for volume in pod["volumes"]:
        problems += [f"volume {kind}" for kind in set(volume) - {"name"} - allowed]
    for container in containers_of(pod):
        own = container["securityContext"]
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            problems.append(f"{container['name']}: privileges")
        if own.get("capabilities") != {"drop": ["ALL"]}:
            problems.append(f"{container['name']}: capabilities")
        if "runAsUser" in own or "seccompProfile" in own:
            problems.append(f"{container['name']}: overrides the pod's security context")
    return problems
