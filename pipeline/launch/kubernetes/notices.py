"""What a launch on Kubernetes shows to people: each thing once, pods with the end of their log."""

from dataclasses import dataclass

from pipeline.exits import CONFIGURATION_ERROR
from pipeline.launch.base import Screen
from pipeline.launch.kubernetes import names
from pipeline.launch.kubernetes.api import Api, ApiUnavailableError
from pipeline.launch.kubernetes.pods import Phase, Pod
from pipeline.launch.kubernetes.watch import Job
from pipeline.launch.tail import failed_first, why_ended


@dataclass(frozen=True)
class _Ended:
    """How a pod of a gang ended. Example: _Ended('training node 0 (pod ...) failed: ...', ...)."""

    how: str
    log: str
    is_last: bool
    """Nothing more is written to its log."""


LOG_LINES = 200
"""The most lines that are read of a pod's log."""


class Notices:
    """The lines that people see of a launch. Not safe to use from several threads at once."""

    def __init__(self, screen: Screen, api: Api) -> None:
        self._screen = screen
        self._api = api
        self._shown: set[tuple[str, str]] = set()
        self._gangs: dict[str, dict[str, _Ended]] = {}
        """By Job and pod: how the pods of a gang with a failed pod ended. The Job controller
        deletes those that still run, and with them their logs, where the cause may stand."""
        self._outage = False

    def once(self, about: str, text: str) -> None:
        """Show a line, unless it was shown about the same Job or pod before."""
        if (about, text) not in self._shown:
            self._shown.add((about, text))
            self._screen.line(text)

    def started(self, job: str, created: bool) -> None:
        """A Job was created, or was there already."""
        self._screen.line(f"created Job {job}" if created else f"attached to Job {job}")

    def outage(self, error: ApiUnavailableError | None) -> None:
        """The API server does not answer, or (None) it does; shown when that changes."""
        if error is not None and not self._outage:
            self._screen.line(f"the Kubernetes API is away, waiting for it: {error}")
        if error is None and self._outage:
            self._screen.line("the Kubernetes API answers again")
        self._outage = error is not None

    def lost_pods(self, job: Job) -> None:
        """Pods that were taken away or have failed, and which restarts follow from that."""
        for pod in job.pods:
            if pod.disruption is not None and pod.is_live:  # once it has ended it is gone at once
                self.once(pod.uid, f"{pod.who} is taken away: {pod.disruption}")
        for pod in job.failed_pods:
            if (pod.uid, "failed") not in self._shown:
                self._shown.add((pod.uid, "failed"))
                self._screen.line(self._failed_pod(pod))
        if job.component == names.TRAINING and job.failed_pods:
            self._remember(job)
        if job.component == names.ROLLOUT and not job.failing:
            for pod in job.pods:
                self._restart(job, pod)

    def still_at_work(self, pod: Pod) -> None:
        """A pod that did not end in time, with its log, which goes when the pod is deleted."""
        self._screen.line(f"{pod.who} is {pod.phase.value}{self._end_of_log(pod)}")

    def failed_job(self, job: Job) -> str:
        """Why a Job failed for good: the pod that failed first, with its log, and what followed."""
        text = f"{job.component} Job {job.name} failed: {job.failure}"
        if ended := list(self._gangs.get(job.name, {}).values()):
            logs = [pod.log for pod in ended]
            first = failed_first(logs) or 0
            return f"{text}\n{ended[first].how}{_quoted_log(why_ended(logs))}"
        for pod in job.failed_pods[:1]:
            text += f"\n{self._failed_pod(pod)}"
        return text

    def _remember(self, job: Job) -> None:
        """Read the logs of a failing gang, those of its pods that failed first coming first."""
        known = self._gangs.setdefault(job.name, {})
        live = [pod for pod in job.pods if pod.is_live]
        for pod in [*job.failed_pods, *live]:
            if pod.name in known and known[pod.name].is_last:
                continue
            log = self._api.log_tail(pod.name, LOG_LINES)
            if log or pod.name not in known:
                how = f"{pod.who} failed: {pod.trouble}" if pod.trouble else pod.who
                known[pod.name] = _Ended(how, log, not pod.is_live)

    def _restart(self, job: Job, pod: Pod) -> None:
        """Count the times that the Job controller starts a rollout worker again.

        A pod that was deleted by force may be gone before it is seen as failed: the pod that
        follows it has the count too.
        """
        limit = job.body["spec"]["backoffLimitPerIndex"]
        counts = pod.phase is Phase.FAILED and pod.disruption is None
        restarts = pod.failures_before + counts
        if 0 < restarts <= limit and pod.exit_code != CONFIGURATION_ERROR:
            text = f"rollout worker {pod.index}: restart {restarts} of {limit}"
            self.once(job.name, text)

    def _failed_pod(self, pod: Pod) -> str:
        return f"{pod.who} failed: {pod.trouble}{self._end_of_log(pod)}"

    def _end_of_log(self, pod: Pod) -> str:
        return _quoted_log(why_ended([self._api.log_tail(pod.name, LOG_LINES)]))


def _quoted_log(quoted: str) -> str:
    return f". From its log:\n{quoted}" if quoted else ""
