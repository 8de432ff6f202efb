"""The description of an installation, from a file that the Helm chart renders."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import InputError

VARIABLE = "RETRACE_CLUSTER"
"""Environment variable that contains the path of the file."""


@dataclass(frozen=True)
class Component:
    """Pods of one kind. Example: Component(None, {'spec': {'containers': [...]}})."""

    gpus: int | None
    """GPUs per pod. If None, the run's settings imply the number."""
    template: Mapping[str, Any]
    """PodTemplateSpec without the parts that depend on the run."""


@dataclass(frozen=True)
class JobRules:
    """Limits and labels for all Jobs."""

    ttl_s: int
    """Seconds after which Kubernetes removes a finished Job, with its pods and their logs."""
    deadline_s: int
    """Seconds after which Kubernetes kills a running Job."""
    queue: str
    """Kueue's local queue. If empty, Jobs start without Kueue."""
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Cluster:
    """An installation of Retrace in a cluster."""

    namespace: str
    instance: str
    """The installation's name, which is a label of all its Jobs."""
    store_uri: str
    """store.uri of runs that do not set it."""
    gpu_resource: str
    """Name of the GPU resource (nvidia.com/gpu). If empty, pods do not request GPUs."""
    jobs: JobRules
    rollout: Component
    training: Component


def read_cluster() -> Cluster:
    """Read the file that RETRACE_CLUSTER names. Raises InputError."""
    path = os.environ.get(VARIABLE)
    if path is None:
        raise InputError(
            [f"{VARIABLE} is not set; run this program in a pod of the Helm chart, which sets it"]
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
                f"{VARIABLE}: {path} cannot be read: {error!r}; expected a file from the Helm "
                "chart's ConfigMap; upgrade the chart and the images together"
            ]
        ) from error
