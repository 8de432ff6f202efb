"""Labels, annotations and names of a run's Jobs.

Whoever knows the run's URI and the attempt knows the names, so a flow pod that comes back finds
the Jobs of the one before it, and creating them twice is refused by the API server.
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
"""Annotation, for people: the run's root in the object store."""
RESTARTS = "retrace.dev/restarts"
"""Annotation of a training Job: restarts that count against launch.max_restarts so far."""

RETRACE = "retrace"
"""Value of MANAGED_BY."""
ROLLOUT = "rollout"
TRAINING = "training"
"""Values of COMPONENT, and names of the pods' containers."""

JOB_OF_POD = "batch.kubernetes.io/job-name"
INDEX_OF_POD = "batch.kubernetes.io/job-completion-index"
FAILURES_OF_INDEX = "batch.kubernetes.io/job-index-failure-count"
"""Annotation of a pod: failures of its index before it that count against backoffLimitPerIndex."""
FLOW_RUN_OF_FLOW_POD = "prefect.io/flow-run-id"
"""Prefect's own label of flow Jobs and their pods."""


def selector(labels: Mapping[str, str]) -> str:
    """A label selector. Example: selector({RUN: 'quickstart'}) == 'retrace.dev/run=quickstart'."""
    return ",".join(f"{name}={value}" for name, value in labels.items())


def rollout_job_name(run: str, run_uri: str, attempt: int) -> str:
    """Example: quickstart-3fa2c1-0-rollout."""
    return f"{_prefix(run, run_uri, attempt)}-rollout"


def training_job_name(run: str, run_uri: str, attempt: int, gang: int) -> str:
    """Of the gang-th gang of an attempt, and of its Service. Example: quickstart-3fa2c1-0-train-0.

    At most 60 characters for a run's name of 40: with a pod's index it is a host name.
    """
    return f"{_prefix(run, run_uri, attempt)}-train-{gang}"


def is_of(job_name: str, run: str, run_uri: str) -> bool:
    """Whether a Job belongs to a run, whatever its attempt."""
    return job_name.startswith(f"{_stem(run, run_uri)}-")


def gang_of(job_name: str) -> int:
    """The number of a training Job's gang."""
    return int(job_name.rpartition("-")[2])


def _prefix(run: str, run_uri: str, attempt: int) -> str:
    return f"{_stem(run, run_uri)}-{attempt}"


def _stem(run: str, run_uri: str) -> str:
    return f"{run}-{hashlib.sha256(run_uri.encode()).hexdigest()[:6]}"
