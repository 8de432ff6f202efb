"""Lines for users about a launch on Kubernetes.

Each event is shown only once. A failed pod is shown with the end of its log.
"""

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
    """Whether the pod has ended, in which case its log is complete."""


LOG_LINES = 200
"""Maximum number of lines to read from the end of a pod's log."""


class Notices:
    """The lines that users see about a launch. Only one thread at a time may use an instance."""

    def __init__(self, screen: Screen, api: Api) -> None:
        self._screen = screen
        self._api = api
        self._shown: set[tuple[str, str]] = set()
        self._gangs: dict[str, dict[str, _Ended]] = {}
        """How the pods of a failing gang ended, keyed by Job and pod.

        Logs are kept here because one of them may name the cause of the failure, and the Job
        controller deletes the pods that are still running, along with their logs.
        """
        self._outage = False

    def once(self, about: str, text: str) -> None:
        """Show a line, unless it was already shown for the same Job or pod."""
        if (about, text) not in self._shown:
            self._shown.add((about, text))
            self._screen.line(text)

    def started(self, job: str, created: bool) -> None:
        """Show that a Job was created, or that it already existed."""
        self._screen.line(f"created Job {job}" if created else f"attached to Job {job}")

    def outage(self, error: ApiUnavailableError | None) -> None:
        """Show once that the API server is not responding.

        If `error` is None, show that the server is responding again.
        """
        if error is not None and not self._outage:
            self._screen.line(f"the Kubernetes API is not responding; waiting for it: {error}")
        if error is None and self._outage:
            self._screen.line("the Kubernetes API is responding again")
        self._outage = error is not None

    def lost_pods(self, job: Job) -> None:
        """Show disrupted and failed pods, and the restarts that follow."""
        for pod in job.pods:
            if pod.disruption is not None and pod.is_live:  # a pod that has ended will soon be gone
                self.once(pod.uid, f"{pod.who} is being disrupted: {pod.disruption}")
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
        """Show a pod that did not end in time, and the end of its log, before both are deleted."""
        self._screen.line(f"{pod.who} is {pod.phase.value}{self._end_of_log(pod)}")

    def failed_job(self, job: Job) -> str:
        """Return why a Job failed permanently.

        The text describes the pod that failed first and quotes its log, then lists the failures
        that followed.
        """
        text = f"{job.component} Job {job.name} failed: {job.failure}"
        if ended := list(self._gangs.get(job.name, {}).values()):
            logs = [pod.log for pod in ended]
            first = failed_first(logs) or 0
            return f"{text}\n{ended[first].how}{_quoted_log(why_ended(logs))}"
        for pod in job.failed_pods[:1]:
            text += f"\n{self._failed_pod(pod)}"
        return text

    def _remember(self, job: Job) -> None:
        """Read the logs of a failing gang, beginning with the pods that failed first."""
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
        """Show how many times the Job controller has restarted a rollout worker.

        A pod that was deleted by force may disappear before the launcher has seen it fail. The
        count is then taken from its replacement.
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
