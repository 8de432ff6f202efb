"""Labels, annotations and names of a run's Jobs.

The names are derived from the run's URI and the attempt. A restarted flow pod therefore finds the
Jobs of its predecessor, and the API server refuses to create a Job twice.
"""

import hashlib
from collections.abc import Mapping

MANAGED_BY = "app.kubernetes.io/managed-by"
INSTANCE = "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"
RUN = "retrace.dev/run"
FLOW_RUN = "retrace.dev/flow-run"
ATTEMPT = "retrace.dev/attempt"

RUN_URI = "retrace.dev/run-uri"
"""Annotation for users: the run's root in the object store."""
RESTARTS = "retrace.dev/restarts"
"""Annotation of a training Job: number of restarts that count towards launch.max_restarts."""

RETRACE = "retrace"
"""Value of MANAGED_BY."""
ROLLOUT = "rollout"
TRAINING = "training"
"""ROLLOUT and TRAINING are the values of the label COMPONENT and the names of the containers."""

JOB_OF_POD = "batch.kubernetes.io/job-name"
INDEX_OF_POD = "batch.kubernetes.io/job-completion-index"
FAILURES_OF_INDEX = "batch.kubernetes.io/job-index-failure-count"
"""Annotation of a pod: failures of its index that count towards backoffLimitPerIndex."""
FLOW_RUN_OF_FLOW_POD = "prefect.io/flow-run-id"
"""The label that Prefect adds to flow Jobs and their pods."""


def selector(labels: Mapping[str, str]) -> str:
    """Return a label selector.

    Example: selector({RUN: 'quickstart'}) == 'retrace.dev/run=quickstart'.
    """
    return ",".join(f"{name}={value}" for name, value in labels.items())


def rollout_job_name(run: str, run_uri: str, attempt: int) -> str:
    """Return the name of an attempt's rollout Job. Example: quickstart-3fa2c1-0-rollout.

    Args:
        run: The run's name.
        run_uri: The run's root in the store.
        attempt: The attempt's number.
    """
    return f"{_prefix(run, run_uri, attempt)}-rollout"


def training_job_name(run: str, run_uri: str, attempt: int, gang: int) -> str:
    """Return the name of a gang's Job and Service. Example: quickstart-3fa2c1-0-train-0.

    A run's name has at most 40 characters, so this name has at most 60. A pod's host name (this
    name and the pod's index) thus fits into a DNS label.

    Args:
        run: The run's name.
        run_uri: The run's root in the store.
        attempt: The attempt's number.
        gang: The gang's number in the attempt, counted from 0.
    """
    return f"{_prefix(run, run_uri, attempt)}-train-{gang}"


def is_of(job_name: str, run: str, run_uri: str) -> bool:
    """Return whether a Job belongs to any attempt of a run.

    Args:
        job_name: The Job's name.
        run: The run's name.
        run_uri: The run's root in the store.
    """
    return job_name.startswith(f"{_stem(run, run_uri)}-")


def gang_of(job_name: str) -> int:
    """Return the gang number in a training Job's name."""
    return int(job_name.rpartition("-")[2])


def _prefix(run: str, run_uri: str, attempt: int) -> str:
    return f"{_stem(run, run_uri)}-{attempt}"


def _stem(run: str, run_uri: str) -> str:
    return f"{run}-{hashlib.sha256(run_uri.encode()).hexdigest()[:6]}"
