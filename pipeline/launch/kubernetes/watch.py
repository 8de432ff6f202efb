"""A launch as the API server shows it: its Jobs with their pods, and what state they are in."""

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
    """Suspended, as Kueue does until there is room for it."""
    failure: str | None
    """Why it failed, once none of its pods runs any more; None: it did not fail."""
    failing: bool
    """It has failed or is about to; the Job controller ends those of its pods that still run."""
    disrupted: bool
    """It failed because of a pod that was evicted, preempted or drained, by podFailurePolicy."""
    complete: bool
    pods: tuple[Pod, ...]
    body: Mapping[str, Any]
    """As the API server describes it."""

    @property
    def ended(self) -> bool:
        """Nothing of it will run again."""
        return self.complete or self.failure is not None

    @property
    def failed_pods(self) -> list[Pod]:
        """The first to fail first; those that were only asked to end because of it come last."""
        failed = [pod for pod in self.pods if pod.phase is Phase.FAILED]
        return sorted(failed, key=lambda pod: (pod.exit_code == _SIGTERM, pod.ended_at, pod.index))


def read_jobs(jobs: Sequence[Mapping[str, Any]], pods: Sequence[Pod]) -> list[Job]:
    """Jobs as the API server describes them, with their pods; one that is being deleted is gone."""
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
    """What a Job's pods are doing, in a few words. Example: 1 running, 1 loading the model."""
    if job.queued:
        return f"queued (Job {job.name} is suspended until there is room for it)"
    live = [pod for pod in job.pods if pod.phase is not Phase.FAILED]
    if not live:
        return "to be restarted" if job.pods else "no pod yet"
    counts = Counter(pod.phase for pod in live)
    return ", ".join(f"{counts[phase]} {phase.value}" for phase in Phase if counts[phase])
