"""The state of a launch, read from the API server: its Jobs and their pods."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.launch.kubernetes import names
from pipeline.launch.kubernetes.pods import Phase, Pod

_SIGTERM = 143


@dataclass(frozen=True)
class Job:
    """A Job of a launch. Example: Job('q-3fa2c1-0-rollout', 'rollout', '0', False, ...)."""

    name: str
    component: str
    attempt: str
    queued: bool
    """Whether the Job is suspended, for example by Kueue until resources are free."""
    failure: str | None
    """Why the Job failed; None if it has not failed or one of its pods still runs."""
    failing: bool
    """Whether the Job has failed or is about to fail; the Job controller ends its running pods."""
    disrupted: bool
    """Whether podFailurePolicy ended the Job because a pod was evicted, preempted or drained."""
    complete: bool
    pods: tuple[Pod, ...]
    body: Mapping[str, Any]
    """The Job's object, as the API server returned it."""

    @property
    def ended(self) -> bool:
        """Return whether no pod of the Job will run again."""
        return self.complete or self.failure is not None

    @property
    def failed_pods(self) -> list[Pod]:
        """Return the failed pods in order of failure; those that SIGTERM ended come last."""
        failed = [pod for pod in self.pods if pod.phase is Phase.FAILED]
        return sorted(failed, key=lambda pod: (pod.exit_code == _SIGTERM, pod.ended_at, pod.index))


def read_jobs(jobs: Sequence[Mapping[str, Any]], pods: Sequence[Pod]) -> list[Job]:
    """Read Jobs from the API server's objects, except those that are being deleted."""
    return [
        _read_job(job, tuple(pod for pod in pods if pod.job == job["metadata"]["name"]))
        for job in jobs
        if "deletionTimestamp" not in job["metadata"]
    ]


def _read_job(job: Mapping[str, Any], pods: tuple[Pod, ...]) -> Job:
    conditions = {
        condition["type"]: condition
        for condition in job.get("status", {}).get("conditions") or []
        if condition["status"] == "True"
    }
    failed = conditions.get("Failed")
    running = any(pod.phase in (Phase.LOADING, Phase.RUNNING) for pod in pods)
    return Job(
        name=job["metadata"]["name"],
        component=job["metadata"]["labels"][names.COMPONENT],
        attempt=job["metadata"]["labels"][names.ATTEMPT],
        queued=bool(job["spec"].get("suspend")),
        failure=f"{failed.get('reason')}: {failed.get('message')}"
        if failed and not running
        else None,
        failing=failed is not None or "FailureTarget" in conditions,
        disrupted=failed is not None
        and failed.get("reason") == "PodFailurePolicy"
        and "DisruptionTarget" in failed.get("message", ""),
        complete="Complete" in conditions,
        pods=pods,
        body=job,
    )


def state_text(job: Job) -> str:
    """Summarize the state of a Job's pods. Example: 1 running, 1 loading the model."""
    if job.queued:
        return f"queued (Job {job.name} is suspended until resources are free)"
    live = [pod for pod in job.pods if pod.phase is not Phase.FAILED]
    if not live:
        return "to be restarted" if job.pods else "no pod yet"
    counts = Counter(pod.phase for pod in live)
    return ", ".join(f"{counts[phase]} {phase.value}" for phase in Phase if counts[phase])
