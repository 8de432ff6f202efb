"""The launcher that creates a run's Kubernetes Jobs, or attaches to them, and watches them.

All state is in the names, labels and annotations of the Jobs. A restarted flow pod computes the
same names, attaches to the existing Jobs and continues to watch them; the workers are not affected.

Every _LOOK_EVERY_S seconds, the launcher reads Jobs and pods from the API server. If a pod does not
start, the launcher shows the reason as soon as the cluster reports one. If the pod has not started
after launch.start_timeout_s, the launcher makes the run fail.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from pipeline.exits import CONFIGURATION_ERROR
from pipeline.launch.base import LaunchError, Screen, StageFailedError, repeats_of
from pipeline.launch.kubernetes import names
from pipeline.launch.kubernetes.api import Api, ApiUnavailableError
from pipeline.launch.kubernetes.jobs import (
    ClusterLaunch,
    rollout_job,
    training_job,
    training_service,
)
from pipeline.launch.kubernetes.notices import LOG_LINES, Notices
from pipeline.launch.kubernetes.pods import Phase, Pod, read_pod
from pipeline.launch.kubernetes.watch import Job, read_jobs, state_text
from pipeline.launch.tail import rank_exit_codes

_LOOK_EVERY_S = 2.0
_NO_POD_S = 15.0
"""Seconds after which the launcher reads the events of a Job that has no pods, or of a pod that has
not started.

Such an event may name, for example, a quota, an admission rule or a volume.
"""
_MISSING_S = 30.0
"""How many seconds a Job may be missing before the run fails.

A cancelled run needs this time, because its Jobs are deleted before its flow ends.
"""
_BACK_OFF_S = 10.0
"""Seconds before a gang's first restart.

The delay doubles with each further restart, as it does for the pods of a Job.
"""
_CLEAR_S = 120.0
"""Seconds within which pods of earlier attempts must end."""


@dataclass
class KubernetesWorkers:
    """The Jobs of one attempt of a run. Several threads may call `check` at the same time."""

    launch: ClusterLaunch
    api: Api
    screen: Screen
    repeats: Callable[[], str | None] = lambda: None
    """Returns a text for users about the work that a new gang repeats, or None."""
    _failure: str | None = None
    _queued: bool = False
    _looked_s: float = -_LOOK_EVERY_S
    _notices: Notices = field(init=False)
    _disrupted: set[str] = field(default_factory=set)
    """Jobs with a pod that was evicted, preempted or drained while the launcher watched.

    Ranks in other pods may make the Job fail before the disrupted pod fails.
    """
    _served: set[str] = field(default_factory=set)
    """Gangs whose Service exists."""
    _since_s: dict[str, float] = field(default_factory=dict)
    """When each problem began, as time.monotonic() values, keyed by subject.

    The problems are a missing Job, a Job without pods, and a pod that does not start.
    """
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._notices = Notices(self.screen, self.api)

    def start(self) -> None:
        """Create missing Jobs and attach to existing ones.

        Raises ApiUnavailableError or LaunchError. A LaunchError is also raised if pods of an
        earlier attempt do not end, because two attempts must never work at the same time.
        """
        self._end_other_attempts()
        if self.launch.attempt.rollout_workers:
            job = rollout_job(self.launch)
            self._notices.started(job["metadata"]["name"], self.api.create_job(job))
        gangs = self._gangs(self._jobs())
        if gangs:
            self._notices.started(gangs[-1].name, False)
        else:
            self._start_gang(0, 0)
            gangs = self._gangs(self._jobs())
        self._serve(gangs[-1:])

    def check(self) -> bool:
        """Create the next gang if one failed, and show each pod's problem once.

        Return whether a Job is queued. Raises LaunchError if too many gangs have failed, or if the
        next gang cannot be created.
        """
        with self._lock:
            if self._failure is not None:  # raised again in every waiting thread
                raise StageFailedError(self._failure)
            if time.monotonic() - self._looked_s < _LOOK_EVERY_S:
                return self._queued
            try:
                jobs = self._jobs()
                self._judge(jobs)
                self._notices.outage(None)
            except ApiUnavailableError as error:
                self._notices.outage(error)  # the workers continue without the API server
            except LaunchError as error:
                self._failure = str(error)
                raise
            finally:
                self._looked_s = time.monotonic()
            return self._queued

    def stop(self, grace_s: float) -> None:
        """Wait `grace_s` seconds for the workers to end, then delete Jobs that have not ended.

        Jobs that have ended remain for their time to live, so that the logs of their pods are kept.
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
                for pod in job.pods:  # deleting a pod deletes its log
                    if pod.is_live:
                        self._notices.still_at_work(pod)
                self.screen.line(f"deleting Job {job.name}, which has not ended in time")
                self.api.delete_job(job.name)
        except (ApiUnavailableError, LaunchError) as error:
            self.screen.line(f"the Jobs could not be deleted; the janitor will do so: {error}")

    def detach(self) -> bool:
        """Return True, because the Jobs continue and the next flow pod attaches to them."""
        with self._lock:
            self._failure = self._failure or "the flow is being ended"
        return True

    def _judge(self, jobs: list[Job]) -> None:
        """Act on the state of the Jobs: restart a failed gang, show problems, or fail the run.

        Raises StageFailedError, ApiUnavailableError or LaunchError.
        """
        rollout = [job for job in jobs if job.component == names.ROLLOUT]
        gangs = self._gangs(jobs)
        if self.launch.attempt.rollout_workers:
            self._expect(names.ROLLOUT, rollout)
        self._expect(names.TRAINING, gangs)
        self._serve([gang for gang in gangs[-1:] if not gang.ended])
        current = [*rollout, *gangs[-1:]]
        for job in current:
            if any(pod.disruption is not None for pod in job.pods):
                self._disrupted.add(job.name)
            self._notices.lost_pods(job)
        for job in rollout:
            if job.failure is not None:
                raise StageFailedError(self._notices.failed_job(job))
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
                f"the {component} Job of {self.launch.run} was deleted by a user or a program; "
                "start the run again, and it continues from the last commit"
            )

    def _await_start(self, job: Job) -> None:
        """Show why pods do not start; raise StageFailedError after launch.start_timeout_s."""
        limit_s = self.launch.config.launch.start_timeout_s
        waiting_s = self._clock(job.name, not job.pods and not job.queued)
        if waiting_s > _NO_POD_S:
            cause = self.api.last_warning(job.name) or "the Job controller has created no pod"
            self._notices.once(job.name, f"Job {job.name} has no pod: {cause}")
            if waiting_s > limit_s:
                raise StageFailedError(f"Job {job.name} has no pod: {cause}; {_too_long(limit_s)}")
        for pod in job.pods:
            pending = pod.phase in (Phase.PENDING, Phase.STARTING)
            waiting_s = self._clock(pod.uid, pending)
            if not pending:
                continue
            why = pod.trouble
            if why is None and waiting_s > _NO_POD_S:  # for example, a volume cannot be mounted
                why = self.api.last_warning(pod.name)
            if why is not None:
                self._notices.once(pod.uid, f"{pod.who} does not start: {why}")
            if waiting_s > limit_s:
                why = why or f"the pod is still {pod.phase.value}"
                raise StageFailedError(f"{pod.who} does not start: {why}; {_too_long(limit_s)}")

    def _restart_gang(self, gang: Job) -> None:
        limit = self.launch.config.launch.max_restarts
        restarts = int(gang.body["metadata"]["annotations"][names.RESTARTS])
        disrupted = gang.disrupted or gang.name in self._disrupted
        restarts += 0 if disrupted else 1
        if restarts > limit or any(self._is_configuration_error(pod) for pod in gang.failed_pods):
            raise StageFailedError(self._notices.failed_job(gang))
        if self._clock(f"{gang.name} was lost", True) < _BACK_OFF_S * 2 ** (restarts - 1):
            return
        number = names.gang_of(gang.name) + 1
        count = "a disruption does not count" if disrupted else f"restart {restarts} of {limit}"
        self.screen.line(f"training gang {gang.name} was lost; creating the next one: {count}")
        if (again := self.repeats()) is not None:
            self.screen.line(again)
        self._start_gang(number, restarts)

    def _start_gang(self, number: int, restarts: int) -> None:
        job = training_job(self.launch, number, restarts)
        self._notices.started(job["metadata"]["name"], self.api.create_job(job))

    def _serve(self, gangs: list[Job]) -> None:
        """Create the missing Services for gangs. A Service needs the uid of its gang's Job."""
        for gang in gangs:
            if gang.name not in self._served:
                self.api.create_service(training_service(self.launch, gang.body))
                self._served.add(gang.name)

    def _is_configuration_error(self, pod: Pod) -> bool:
        # torchrun always exits with 1; its report in the log contains the ranks' exit codes.
        return pod.exit_code == CONFIGURATION_ERROR or CONFIGURATION_ERROR in rank_exit_codes(
            self.api.log_tail(pod.name, LOG_LINES)
        )

    def _clock(self, about: str, runs: bool) -> float:
        """Return the seconds since `runs` became true for `about`; 0 while it is false."""
        if not runs:
            self._since_s.pop(about, None)
            return 0.0
        now_s = time.monotonic()
        return now_s - self._since_s.setdefault(about, now_s)

    def _jobs(self) -> list[Job]:
        """Return this attempt's Jobs with their pods."""
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
                self._notices.once(job.name, f"deleting Job {job.name} of an earlier attempt")
                self.api.delete_job(job.name)
            live = [pod for pod in pods if pod.attempt != self._attempt and pod.is_live]
            if not others and not live:
                return
            if time.monotonic() > deadline_s:
                left = live[0].name if live else others[0].name
                raise LaunchError(
                    f"{left} of an earlier attempt of {self.launch.run} has not ended after "
                    f"{_CLEAR_S:.0f} s; check its node, and delete it by force"
                )
            time.sleep(1.0)

    def _look(self) -> tuple[list[Job], list[Pod]]:
        """Return the Jobs and pods of all attempts of the run."""
        launch = self.launch
        labels = {
            names.MANAGED_BY: names.RETRACE,
            names.INSTANCE: launch.cluster.instance,
            names.RUN: launch.run,
        }
        pods = [read_pod(pod) for pod in self.api.pods(labels)]
        jobs = read_jobs(self.api.jobs(labels), pods)
        # Runs in different stores may have the same name.
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
def kubernetes_workers(launch: ClusterLaunch, screen: Screen) -> Iterator[KubernetesWorkers]:
    """Create the workers of an attempt or attach to them.

    The workers outlive the block, so the caller must call `stop` or `detach`. Raises LaunchError.
    """
    again = partial(repeats_of, launch.run_uri)
    workers = KubernetesWorkers(launch, Api(launch.cluster.namespace), screen, again)
    try:
        _start(workers)
    except LaunchError:
        workers.stop(0.0)  # deletes the Jobs created before the error
        raise
    yield workers


def _start(workers: KubernetesWorkers) -> None:
    """Start the workers; retry while the API server is down, for example during an upgrade."""
    deadline_s = time.monotonic() + workers.launch.config.launch.start_timeout_s
    while True:
        try:
            return workers.start()
        except ApiUnavailableError as error:
            if time.monotonic() > deadline_s:
                raise LaunchError(f"the workers cannot be started: {error}") from error
            workers.screen.phase("workers", f"waiting for the Kubernetes API: {error}")
        time.sleep(_LOOK_EVERY_S)
