"""The workers of a run as Kubernetes Jobs: create or attach, watch, restart the gang, stop.

What it knows is in the names, labels and annotations of the Jobs. A flow pod that comes back makes
the same names, attaches to what is there and goes on watching; the workers do not notice.
"""

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeline.config.exits import CONFIGURATION_ERROR
from pipeline.launch.base import LaunchError, Screen, StageFailedError
from pipeline.launch.kubernetes import names
from pipeline.launch.kubernetes.api import Api, ApiUnavailableError
from pipeline.launch.kubernetes.jobs import Launch, rollout_job, training_job, training_service
from pipeline.launch.kubernetes.pods import Phase, Pod, read_pod
from pipeline.launch.kubernetes.watch import Job, read_jobs, state_text
from pipeline.launch.tail import last_lines

_LOOK_EVERY_S = 2.0
_NO_POD_S = 15.0
"""A Job without pods for so long is looked into (a quota, an admission rule), and so is a pod that
does not start for no reason that it tells itself (a volume)."""
_MISSING_S = 30.0
"""A Job that vanished is given so long: the flow of a cancelled run is ended a little later."""
_BACK_OFF_S = 10.0
"""Before the first restart of a gang, doubled with each; as Jobs do it for their pods."""
_CLEAR_S = 120.0
"""Pods of an attempt that is over have so long to end."""
_LOG_LINES = 200
_TORCHRUN_EXIT = re.compile(rf"exitcode\s*:\s*{CONFIGURATION_ERROR}\b")


@dataclass
class KubernetesWorkers:
    """The Jobs of one attempt of a run; safe to check from several threads."""

    launch: Launch
    api: Api
    screen: Screen
    _failure: str | None = None
    _queued: bool = False
    _looked_s: float = -_LOOK_EVERY_S
    _outage: bool = False
    _told: set[tuple[str, str]] = field(default_factory=set)
    """Pods and Jobs, and what was said of them."""
    _disrupted: set[str] = field(default_factory=set)
    """Gangs of which a pod was evicted, preempted or drained, seen while it was there: the ranks of
    others may fail their Job before it does."""
    _served: set[str] = field(default_factory=set)
    """Gangs that have their Service."""
    _since_s: dict[str, float] = field(default_factory=dict)
    """Since when a Job is missing or has no pod, or a pod does not start."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Create the Jobs that are missing, and attach to those that are there.

        Raises LaunchError, also when pods of an earlier attempt do not end: two attempts must
        never be at work. Raises ApiUnavailableError.
        """
        self._end_other_attempts()
        if self.launch.attempt.rollout_workers:
            job = rollout_job(self.launch)
            self._say_started(job["metadata"]["name"], self.api.create_job(job))
        gangs = self._gangs(self._jobs())
        if gangs:
            self._say_started(gangs[-1].name, False)
        else:
            self._start_gang(0, 0)
            gangs = self._gangs(self._jobs())
        self._serve(gangs[-1:])

    def check(self) -> bool:
        """Make the next gang if one failed; LaunchError when too many did, or none can be made.

        Whether a Job is queued. What is wrong with a pod is said once.
        """
        with self._lock:
            if self._failure is not None:  # every thread that waits must hear of it
                raise StageFailedError(self._failure)
            if time.monotonic() - self._looked_s < _LOOK_EVERY_S:
                return self._queued
            try:
                jobs = self._jobs()
                self._judge(jobs)
                self._tell_outage(None)
            except ApiUnavailableError as error:
                self._tell_outage(error)  # the workers do not need the API server
            except LaunchError as error:
                self._failure = str(error)
                raise
            finally:
                self._looked_s = time.monotonic()
            return self._queued

    def stop(self, grace_s: float) -> None:
        """Give the workers time to end by themselves, then delete the Jobs that have not ended.

        Ended Jobs stay until their time to live is over, for their pods' logs.
        """
        with self._lock:
            self._failure = self._failure or "the workers were stopped"
        deadline_s = time.monotonic() + grace_s
        try:
            while (live := [job for job in self._jobs() if not job.ended]) and (
                time.monotonic() < deadline_s
            ):
                time.sleep(1.0)
            for job in live:
                for pod in job.pods:  # its log goes with it
                    if pod.is_live:
                        self.screen.line(f"{pod.who} is {pod.phase.value}{self._log_of(pod)}")
                self.screen.line(f"deleting Job {job.name}: it has not ended by itself")
                self.api.delete_job(job.name)
        except (ApiUnavailableError, LaunchError) as error:
            self.screen.line(f"the Jobs could not be looked after; the janitor will: {error}")

    def detach(self) -> bool:
        """The Jobs go on, and the next flow pod attaches to them."""
        with self._lock:
            self._failure = self._failure or "the flow is being ended"
        return True

    def _judge(self, jobs: list[Job]) -> None:
        """Raises StageFailedError; ApiUnavailableError; LaunchError."""
        rollout = [job for job in jobs if job.component == names.ROLLOUT]
        gangs = self._gangs(jobs)
        if self.launch.attempt.rollout_workers:
            self._expect(names.ROLLOUT, rollout)
        self._expect(names.TRAINING, gangs)
        self._serve([gang for gang in gangs[-1:] if not gang.ended])
        current = [*rollout, *gangs[-1:]]
        for job in current:
            self._tell_lost_pods(job)
        for job in rollout:
            if job.failure is not None:
                raise StageFailedError(self._failure_text(job))
        if gangs and gangs[-1].failure is not None:
            self._restart_gang(gangs[-1])
        self._queued = any(job.queued for job in current)
        for job in current:
            if not job.ended:
                self._await_start(job)
        for component, chosen in ((names.ROLLOUT, rollout), (names.TRAINING, gangs[-1:])):
            text = next((state_text(job) for job in chosen if not job.ended), None)
            self.screen.phase(f"{component} pods", text)

    def _expect(self, component: str, jobs: list[Job]) -> None:
        if self._clock(f"no Job of {component}", not jobs) > _MISSING_S:
            raise StageFailedError(
                f"the {component} Job of {self.launch.run} is gone: somebody has deleted it; start "
                "the run again, it goes on from what is committed"
            )

    def _await_start(self, job: Job) -> None:
        """Say why pods do not start; StageFailedError when it takes longer than the setting."""
        limit_s = self.launch.attempt.start_timeout_s
        waiting_s = self._clock(job.name, not job.pods and not job.queued)
        if waiting_s > _NO_POD_S:
            cause = self.api.last_warning(job.name) or "the Job controller has made no pod"
            self._tell(job.name, f"Job {job.name} has no pod: {cause}")
            if waiting_s > limit_s:
                raise StageFailedError(f"Job {job.name} has no pod: {cause}; {_too_long(limit_s)}")
        for pod in job.pods:
            pending = pod.phase in (Phase.PENDING, Phase.STARTING)
            waiting_s = self._clock(pod.uid, pending)
            if not pending:
                continue
            why = pod.trouble
            if why is None and waiting_s > _NO_POD_S:  # a volume that cannot be mounted, say
                why = self.api.last_warning(pod.name)
            if why is not None:
                self._tell(pod.uid, f"{pod.who} does not start: {why}")
            if waiting_s > limit_s:
                why = why or f"it is still {pod.phase.value}"
                raise StageFailedError(f"{pod.who} does not start: {why}; {_too_long(limit_s)}")

    def _restart_gang(self, gang: Job) -> None:
        limit = self.launch.config.launch.max_restarts
        restarts = int(gang.body["metadata"]["annotations"][names.RESTARTS])
        disrupted = gang.disrupted or gang.name in self._disrupted
        restarts += 0 if disrupted else 1
        if restarts > limit or any(self._is_configuration_error(pod) for pod in gang.failed_pods):
            raise StageFailedError(self._failure_text(gang))
        if self._clock(f"{gang.name} was lost", True) < _BACK_OFF_S * 2 ** (restarts - 1):
            return
        number = names.gang_of(gang.name) + 1
        count = "a disruption does not count" if disrupted else f"restart {restarts} of {limit}"
        self.screen.line(f"training gang {gang.name} was lost, making the next one: {count}")
        self._start_gang(number, restarts)

    def _start_gang(self, number: int, restarts: int) -> None:
        job = training_job(self.launch, number, restarts)
        self._say_started(job["metadata"]["name"], self.api.create_job(job))

    def _serve(self, gangs: list[Job]) -> None:
        """See to it that gangs have their Service; it needs the Job's uid, so it comes second."""
        for gang in gangs:
            if gang.name not in self._served:
                self.api.create_service(training_service(self.launch, gang.body))
                self._served.add(gang.name)

    def _is_configuration_error(self, pod: Pod) -> bool:
        # torchrun ends with 1 whatever its ranks ended with; its report says what that was.
        return pod.exit_code == CONFIGURATION_ERROR or bool(
            _TORCHRUN_EXIT.search(self.api.log_tail(pod.name, _LOG_LINES))
        )

    def _failure_text(self, job: Job) -> str:
        """Why a Job failed for good, with the end of the log of the pod that failed first."""
        text = f"{job.component} Job {job.name} failed: {job.failure}"
        for pod in job.failed_pods[:1]:
            text += f"\n{self._pod_text(pod)}"
        return text

    def _tell_lost_pods(self, job: Job) -> None:
        for pod in job.pods:
            if pod.disruption is not None:
                self._disrupted.add(job.name)
                if pod.is_live:  # once it has ended it is gone at once
                    self._tell(pod.uid, f"{pod.who} is taken away: {pod.disruption}")
        for pod in job.failed_pods:
            if (pod.uid, "failed") not in self._told:
                self.screen.line(self._pod_text(pod))
                self._told.add((pod.uid, "failed"))

    def _pod_text(self, pod: Pod) -> str:
        return f"{pod.who} failed: {pod.trouble}{self._log_of(pod)}"

    def _log_of(self, pod: Pod) -> str:
        log = last_lines(self.api.log_tail(pod.name, _LOG_LINES))
        return f". The end of its log:\n{log}" if log else ""

    def _say_started(self, name: str, created: bool) -> None:
        self.screen.line(f"created Job {name}" if created else f"attached to Job {name}")

    def _tell(self, about: str, text: str) -> None:
        """Say something once."""
        if (about, text) not in self._told:
            self._told.add((about, text))
            self.screen.line(text)

    def _tell_outage(self, error: ApiUnavailableError | None) -> None:
        if error is not None and not self._outage:
            self.screen.line(f"the Kubernetes API is away, waiting for it: {error}")
        if error is None and self._outage:
            self.screen.line("the Kubernetes API answers again")
        self._outage = error is not None

    def _clock(self, about: str, runs: bool) -> float:
        """For how long something has been so; 0 when it is not."""
        if not runs:
            self._since_s.pop(about, None)
            return 0.0
        now_s = time.monotonic()
        return now_s - self._since_s.setdefault(about, now_s)

    def _jobs(self) -> list[Job]:
        """This attempt's Jobs with their pods."""
        return [job for job in self._look()[0] if job.attempt == self._attempt]

    def _gangs(self, jobs: list[Job]) -> list[Job]:
        gangs = [job for job in jobs if job.component == names.TRAINING]
        return sorted(gangs, key=lambda job: names.gang_of(job.name))

    def _end_other_attempts(self) -> None:
        deadline_s = time.monotonic() + _CLEAR_S
        while True:
            jobs, pods = self._look()
            others = [job for job in jobs if job.attempt != self._attempt and not job.ended]
            for job in others:
                self._tell(job.name, f"deleting Job {job.name} of an earlier attempt")
                self.api.delete_job(job.name)
            live = [pod for pod in pods if pod.attempt != self._attempt and pod.is_live]
            if not others and not live:
                return
            if time.monotonic() > deadline_s:
                left = live[0].name if live else others[0].name
                raise LaunchError(
                    f"{left} of an earlier attempt of {self.launch.run} does not end within "
                    f"{_CLEAR_S:.0f} s; look at its node, and remove it by force"
                )
            time.sleep(1.0)

    def _look(self) -> tuple[list[Job], list[Pod]]:
        """All Jobs and pods of the run, whatever their attempt."""
        launch = self.launch
        labels = {
            names.MANAGED_BY: names.RETRACE,
            names.INSTANCE: launch.cluster.instance,
            names.RUN: launch.run,
        }
        pods = [read_pod(pod) for pod in self.api.pods(labels)]
        jobs = read_jobs(self.api.jobs(labels), pods)
        # Runs of two stores may have the same name.
        return (
            [job for job in jobs if names.is_of(job.name, launch.run, launch.run_uri)],
            [pod for pod in pods if names.is_of(pod.job, launch.run, launch.run_uri)],
        )

    @property
    def _attempt(self) -> str:
        return str(self.launch.attempt.number)


def _too_long(limit_s: float) -> str:
    return f"waited {limit_s:.0f} s (launch.start_timeout_s)"


@contextlib.contextmanager
def kubernetes_workers(launch: Launch, screen: Screen) -> Iterator[KubernetesWorkers]:
    """The workers of an attempt, created or attached to. What becomes of them after the block is
    for the caller to say: `stop`, or `detach`.

    Raises LaunchError.
    """
    workers = KubernetesWorkers(launch, Api(launch.cluster.namespace), screen)
    try:
        _start(workers)
    except LaunchError:
        workers.stop(0.0)  # what was created before it
        raise
    yield workers


def _start(workers: KubernetesWorkers) -> None:
    """Start, as often as it takes: the API server may be away while it is upgraded."""
    deadline_s = time.monotonic() + workers.launch.attempt.start_timeout_s
    while True:
        try:
            return workers.start()
        except ApiUnavailableError as error:
            if time.monotonic() > deadline_s:
                raise LaunchError(f"the workers cannot be started: {error}") from error
            workers.screen.phase("workers", f"waiting for the Kubernetes API: {error}")
        time.sleep(_LOOK_EVERY_S)
