"""The installation's description of its cluster: a file that the Helm chart renders."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import InputError

VARIABLE = "RETRACE_CLUSTER"
"""Environment variable with the path of the file."""


@dataclass(frozen=True)
class Component:
    """Pods of one kind. Example: Component(None, {'spec': {'containers': [...]}})."""

    gpus: int | None
    """GPUs of a pod; None: as many as the run's settings imply."""
    template: Mapping[str, Any]
    """PodTemplateSpec: everything about the pods but what a run decides."""


@dataclass(frozen=True)
class JobRules:
    """Limits and labels of every Job."""

    ttl_s: int
    """A Job that has ended is removed after this, with its pods and their logs."""
    deadline_s: int
    """A Job that still runs after this is killed."""
    queue: str
    """Kueue's local queue; empty: Jobs start at once."""
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """An installation of Retrace in a cluster."""

    namespace: str
    instance: str
    """Name of the installation, a label of all its Jobs."""
    store_uri: str
    """store.uri of runs that set none."""
    gpu_resource: str
    """Name of the GPU resource (nvidia.com/gpu); empty: pods ask for no GPU."""
    jobs: JobRules
    rollout: Component
    training: Component


def read_cluster() -> Cluster:
    """The file that RETRACE_CLUSTER names. Raises InputError."""
    path = os.environ.get(VARIABLE)
    if path is None:
        raise InputError(
            [f"{VARIABLE} is not set: this program runs in a pod of the Helm chart, which sets it"]
        )
    try:
        body = yaml.safe_load(Path(path).read_text())
        jobs = body["jobs"]
        return Cluster(
            namespace=body["namespace"],
            instance=body["instance"],
            store_uri=body["storeUri"],
            gpu_resource=body["gpuResource"] or "",
            jobs=JobRules(
                ttl_s=jobs["ttlSecondsAfterFinished"],
                deadline_s=jobs["activeDeadlineSeconds"],
                queue=jobs["queueName"] or "",
                labels=jobs["labels"] or {},
            ),
            rollout=Component(**body["rollout"]),
            training=Component(**body["training"]),
        )
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise InputError(
            [
                f"{VARIABLE}: {path} cannot be read: {error!r}; it is the ConfigMap that the Helm "
                "chart renders: upgrade chart and images together"
            ]
        ) from error
