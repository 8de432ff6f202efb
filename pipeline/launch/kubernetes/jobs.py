"""The bodies of a run's Jobs: the installation's pod templates, completed with the run's settings.

rollout    One Indexed Job. Kubernetes restarts only the index that failed, so the other engines
           stay loaded. Evicted and preempted pods do not count as failures.
training   A gang: an Indexed Job with one pod per node, and a headless Service through which
           torchrun's agents find node 0. If any pod is lost, the Job fails, because the other
           ranks cannot continue. The launcher then creates the next gang.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.launch import PodSettings
from pipeline.config.rules.pods import gpus_of
from pipeline.config.tree import RunConfig
from pipeline.exits import CONFIGURATION_ERROR
from pipeline.launch.commands import rollout_command, training_command, words
from pipeline.launch.kubernetes import names
from pipeline.launch.kubernetes.cluster import Cluster, Component
from pipeline.run.attempts import Attempt
from pipeline.store.settings import environment

Manifest = dict[str, Any]

_PORT = 29500
"""Port of a gang's node 0: torchrun's default."""
_INDEX = "$(JOB_COMPLETION_INDEX)"
"""The pod's index in its Job; Kubernetes replaces this variable in the command."""
_READY_FILE = "/tmp/retrace-ready"
_DISRUPTED = {"type": "DisruptionTarget", "status": "True"}
_QUEUE = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True)
class ClusterLaunch:
    """One attempt of a run in a cluster, with everything that determines its Jobs."""

    cluster: Cluster
    config: RunConfig
    """The settings in force in the attempt."""
    run_uri: str
    attempt: Attempt
    flow_run: str
    """Id of the flow run to which the Jobs belong."""

    @property
    def run(self) -> str:
        """The run's name."""
        return self.config.trainer.run_name

    def labels(self, component: str) -> dict[str, str]:
        """Return the labels for a Job, its pods and its Service."""
        return {
            **self.cluster.jobs.labels,
            names.MANAGED_BY: names.RETRACE,
            names.INSTANCE: self.cluster.instance,
            names.COMPONENT: component,
            names.RUN: self.run,
            names.FLOW_RUN: self.flow_run,
            names.ATTEMPT: str(self.attempt.number),
        }


def rollout_job(launch: ClusterLaunch) -> Manifest:
    """Return the Job for all rollout workers; the pod with index i is worker i."""
    settings = launch.config.launch.kubernetes.rollout
    rollout = launch.config.actor_rollout_ref.rollout
    gpus = _gpus(launch, launch.cluster.rollout, settings, rollout.tensor_model_parallel_size)
    command = rollout_command("python", launch.run_uri, _INDEX, launch.attempt.number)
    job = _job(
        launch,
        names.rollout_job_name(launch.run, launch.run_uri, launch.attempt.number),
        names.ROLLOUT,
        launch.attempt.rollout_workers,
        _pod(launch, launch.cluster.rollout, settings, names.ROLLOUT, command, gpus),
    )
    job["spec"] |= {
        "backoffLimitPerIndex": launch.config.launch.max_restarts,
        "maxFailedIndexes": 0,  # the run cannot continue without the worker of a shard
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"operator": "In", "values": [CONFIGURATION_ERROR]},
                },
                {"action": "Ignore", "onPodConditions": [_DISRUPTED]},
            ]
        },
    }
    return job


def training_job(launch: ClusterLaunch, gang: int, restarts: int) -> Manifest:
    """Return the Job for a training gang.

    Args:
        launch: The attempt of the run.
        gang: The gang's number in the attempt, counted from 0.
        restarts: The number of restarts so far that count towards launch.max_restarts.
    """
    settings = launch.config.launch.kubernetes.training
    trainer = launch.config.trainer
    gpus = _gpus(launch, launch.cluster.training, settings, trainer.n_gpus_per_node)
    name = names.training_job_name(launch.run, launch.run_uri, launch.attempt.number, gang)
    nodes = {
        "--nnodes": str(trainer.nnodes),
        "--node-rank": _INDEX,
        "--master-addr": f"{name}-0.{name}",
        "--master-port": str(_PORT),
        # Pods may start minutes apart, for example when one node must first pull a large image.
        "--rdzv-conf": f"timeout={launch.config.launch.start_timeout_s:.0f}",
    }
    command = training_command(
        "python", words(nodes), trainer.n_gpus_per_node, launch.run_uri, launch.attempt.number
    )
    pod = _pod(launch, launch.cluster.training, settings, names.TRAINING, command, gpus)
    pod["spec"]["subdomain"] = name
    job = _job(launch, name, names.TRAINING, trainer.nnodes, pod)
    job["metadata"]["annotations"][names.RESTARTS] = str(restarts)
    job["spec"] |= {
        "backoffLimit": 0,
        # The Job would fail without this rule as well, but its status would not name the
        # disruption.
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onPodConditions": [_DISRUPTED]}]},
    }
    return job


def training_service(launch: ClusterLaunch, job: Mapping[str, Any]) -> Manifest:
    """Return the headless Service for an existing gang, which is deleted with the gang's Job."""
    name = job["metadata"]["name"]
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": name,
            "labels": launch.labels(names.TRAINING),
            "ownerReferences": [
                {
                    "apiVersion": "batch/v1",
                    "kind": "Job",
                    "name": name,
                    "uid": job["metadata"]["uid"],
                }
            ],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # pods find each other before they are ready
            "selector": {names.JOB_OF_POD: name},
            "ports": [{"name": "rendezvous", "port": _PORT}],
        },
    }


def _gpus(launch: ClusterLaunch, component: Component, settings: PodSettings, implied: int) -> int:
    """Return the GPUs per pod: the number set by the run or the installation, if any.

    Otherwise the number is `implied`, or 0 if the run computes on CPUs or the installation has no
    GPU resource.
    """
    asked = gpus_of(settings, component.gpus)
    if asked is not None:
        return asked
    on_cpu = launch.config.trainer.device == "cpu"
    return implied if launch.cluster.gpu_resource and not on_cpu else 0


def _pod(
    launch: ClusterLaunch,
    component: Component,
    settings: PodSettings,
    name: str,
    command: Sequence[str],
    gpus: int,
) -> Manifest:
    pod: Manifest = copy.deepcopy(dict(component.template))
    metadata = pod.setdefault("metadata", {})
    metadata["labels"] = {**metadata.get("labels", {}), **launch.labels(name)}
    pod["spec"]["restartPolicy"] = "Never"  # the Job controller handles failed pods
    [container] = pod["spec"]["containers"]
    container["command"] = list(command)
    variables = environment(launch.config.store) | {"RETRACE_READY_FILE": _READY_FILE}
    threads = launch.config.launch.threads_per_worker
    if threads is not None:
        variables["OMP_NUM_THREADS"] = str(threads)
    # These variables come last: if two have the same name, Kubernetes uses the last one.
    container["env"] = [
        *container.get("env", []),
        *({"name": variable, "value": value} for variable, value in variables.items()),
    ]
    # A pod becomes ready when its model is loaded, so `kubectl get pods` shows the true state.
    container["readinessProbe"] = {
        "exec": {"command": ["test", "-f", _READY_FILE]},
        "periodSeconds": 5,
    }
    if settings.image is not None:
        container["image"] = settings.image
    resources = container.setdefault("resources", {})
    if settings.cpu is not None:
        _require(resources, "cpu", settings.cpu)
    if settings.memory is not None:
        _require(resources, "memory", settings.memory)
    if gpus:
        _require(resources, launch.cluster.gpu_resource or "nvidia.com/gpu", str(gpus))
    return pod


def _require(resources: Manifest, resource: str, amount: str) -> None:
    for part in ("requests", "limits"):
        resources[part] = {**(resources.get(part) or {}), resource: amount}


def _job(
    launch: ClusterLaunch, name: str, component: str, pods: int, template: Manifest
) -> Manifest:
    rules = launch.cluster.jobs
    labels = launch.labels(component)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            # If Kueue is installed, it suspends a Job with this label until resources are free.
            "labels": labels | ({_QUEUE: rules.queue} if rules.queue else {}),
            "annotations": {names.RUN_URI: launch.run_uri},
        },
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "podReplacementPolicy": "Failed",  # never run two pods with the same index
            "ttlSecondsAfterFinished": rules.ttl_s,
            "activeDeadlineSeconds": rules.deadline_s,
            "template": template,
        },
    }
