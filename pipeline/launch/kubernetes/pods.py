"""The state of a worker's pod, and its problem if it has one, read from the pod's API object."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pipeline.launch.kubernetes import names


class Phase(Enum):
    """The phase of a pod; users see the values."""

    PENDING = "waiting for a node"
    STARTING = "starting (image, volumes)"
    LOADING = "loading the model"
    RUNNING = "running"
    ENDED = "ended"
    FAILED = "failed"


# Reasons why a container waits while the kubelet retries without limit. The pod stays pending, so
# its Job does not count a failure.
_WAITING_TROUBLES = {
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
}


@dataclass(frozen=True)
class Pod:
    """A worker's pod. Example: Pod('q-3fa2c1-0-rollout-1-x2x', '6f0c...', ...)."""

    name: str
    uid: str
    job: str
    component: str
    attempt: str
    index: int
    phase: Phase
    trouble: str | None
    """Why the pod does not start, or why it failed; None if no problem is known."""
    exit_code: int | None
    """Exit code of a failed pod; None if its container never started."""
    disruption: str | None
    """The cluster's message if the pod was evicted, preempted or drained, otherwise None."""
    failures_before: int
    """Number of earlier pods of this index that failed and count towards the Job's limit.

    The number is 0 for training pods, because the first failed pod makes the training Job fail.
    """
    ended_at: str
    """Time at which the container ended (RFC 3339); empty while it runs."""

    @property
    def who(self) -> str:
        """Return a name for users. Example: rollout worker 1 (pod q-3fa2c1-0-rollout-1-x2x)."""
        what = "rollout worker" if self.component == names.ROLLOUT else "training node"
        return f"{what} {self.index} (pod {self.name})"

    @property
    def is_live(self) -> bool:
        """Return whether the pod runs or may still run."""
        return self.phase not in (Phase.ENDED, Phase.FAILED)


def read_pod(pod: Mapping[str, Any]) -> Pod:
    """Read a pod of a run's Job from the API server's object."""
    metadata, status = pod["metadata"], pod.get("status", {})
    labels, annotations = metadata["labels"], metadata.get("annotations", {})
    component = labels[names.COMPONENT]
    state = _container(status).get("state", {})
    phase = _phase(status, state)
    ended = state.get("terminated", {})
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        job=labels.get(names.JOB_OF_POD, ""),
        component=component,
        attempt=labels[names.ATTEMPT],
        index=int(annotations.get(names.INDEX_OF_POD, -1)),
        phase=phase,
        trouble=_why_it_failed(status, ended, _out_of_memory(component, pod))
        if phase is Phase.FAILED
        else _why_not(status, state),
        exit_code=ended.get("exitCode") if phase is Phase.FAILED else None,
        disruption=_disruption(status),
        failures_before=int(annotations.get(names.FAILURES_OF_INDEX, 0)),
        ended_at=ended.get("finishedAt") or "",
    )


def _phase(status: Mapping[str, Any], state: Mapping[str, Any]) -> Phase:
    if status.get("phase") == "Failed":
        return Phase.FAILED
    if status.get("phase") == "Succeeded":
        return Phase.ENDED
    if "terminated" in state:  # the pod's own phase changes later
        return Phase.FAILED if state["terminated"]["exitCode"] else Phase.ENDED
    if "running" in state:
        return Phase.RUNNING if _container(status).get("ready") else Phase.LOADING
    scheduled = _condition(status, "PodScheduled").get("status") == "True"
    return Phase.STARTING if scheduled else Phase.PENDING


def _why_it_failed(status: Mapping[str, Any], ended: Mapping[str, Any], out_of_memory: str) -> str:
    if not ended:
        return f"{status.get('reason', 'failed')}: {status.get('message', 'the node is gone')}"
    reason = ended.get("reason", "Error")
    text = f"exit code {ended['exitCode']}"
    if reason == "OOMKilled":
        return f"OOMKilled ({text}): {out_of_memory}"
    if "reason" in status:  # set by the kubelet, for example if a volume is full
        return f"{status['reason']} ({text}): {status.get('message', '')}".rstrip(": ")
    disruption = _disruption(status)
    if disruption is not None:
        return f"{text}, disrupted: {disruption}"
    return text if reason == "Error" else f"{reason} ({text})"


def _out_of_memory(component: str, pod: Mapping[str, Any]) -> str:
    """Return why a worker ran out of memory, and the settings to change."""
    containers = pod.get("spec", {}).get("containers", [])
    resources = [c.get("resources", {}) for c in containers if c.get("name") == component]
    limit = next(
        (r["limits"]["memory"] for r in resources if "memory" in r.get("limits", {})), None
    )
    setting = f"launch.kubernetes.{component}.memory (or the chart's {component}.resources)"
    if limit is None:
        text = f"the node ran out of memory, and the pod has no memory limit; set {setting}"
    else:
        text = f"the pod needed more memory than its limit of {limit}; raise {setting}"
    if component == names.ROLLOUT:
        text += (
            ", or lower actor_rollout_ref.rollout.trace_buffer_mib and, on CPUs, "
            "actor_rollout_ref.rollout.cpu_kv_cache_gib"
        )
    return text


def _disruption(status: Mapping[str, Any]) -> str | None:
    condition = _condition(status, "DisruptionTarget")
    if condition.get("status") != "True":
        return None
    return condition.get("message") or condition.get("reason") or "the cluster gives no reason"


def _why_not(status: Mapping[str, Any], state: Mapping[str, Any]) -> str | None:
    """Return why a pod does not start; None if no reason is known."""
    waiting = state.get("waiting", {})
    if waiting.get("reason") in _WAITING_TROUBLES:
        return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    scheduled = _condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        return f"{scheduled.get('reason', 'Pending')}: {scheduled.get('message', '')}"
    return None


def _container(status: Mapping[str, Any]) -> Mapping[str, Any]:
    statuses: list[Mapping[str, Any]] = status.get("containerStatuses") or [{}]
    ours = [s for s in statuses if s.get("name") in (names.ROLLOUT, names.TRAINING)]
    return (ours or statuses)[0]


def _condition(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return next((c for c in status.get("conditions") or [] if c["type"] == kind), {})
