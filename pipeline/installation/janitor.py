"""Delete the Jobs of cancelled flow runs, and Jobs that no longer belong to a flow run.

    python -m pipeline.installation.janitor

Every few seconds, the janitor lists the installation's Jobs and asks Prefect for the states of
their flow runs:

worker Jobs   of a cancelled run            are deleted immediately.
              of a run that is over,        are deleted after a grace period, if every check in the
              unknown to Prefect, or        period finds the run in this state and without a live
              without a flow Job            flow pod.
flow Jobs     of a cancelled or crashed     are deleted immediately, because their pending
              run                           pod could start later. If their pod runs, they are kept.

While the API of Prefect or Kubernetes does not answer, the janitor does not delete Jobs. All grace
periods start again afterwards. The janitor keeps its state only in memory. Kubernetes itself
removes Jobs that have ended once their time to live has passed.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from uuid import UUID

from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import StateType

from pipeline.errors import InputError
from pipeline.installation.programs import (
    PrefectApiError,
    log_to_stderr,
    prefect_api,
    work_pool_name,
)
from pipeline.launch.base import LaunchError
from pipeline.launch.kubernetes import names
from pipeline.launch.kubernetes.api import Api, ApiUnavailableError, has_ended
from pipeline.launch.kubernetes.cluster import read_cluster

log = logging.getLogger("pipeline.installation.janitor")

ALIVE = Path("/tmp/janitor-alive")
"""File that the janitor touches after every check, including failed ones."""
_WORK_POOL_OF_FLOW_JOB = "prefect.io/work-pool-name"
_PAGE = 200
_CANCELLED = {StateType.CANCELLING, StateType.CANCELLED}
_OVER = {StateType.COMPLETED, StateType.FAILED, StateType.CRASHED}


def ownerless(state: StateType | None, flow_pods: Collection[str], flow_job: bool) -> bool:
    """Return whether a flow run has no live flow pod and will not get one.

    The result is False for cancelled runs, whose Jobs are deleted without this check.

    Args:
        state: The flow run's state; None if Prefect does not know the run.
        flow_pods: The phases of the flow run's pods.
        flow_job: Whether a flow Job exists; it could create another flow pod.
    """
    if set(flow_pods) - {"Succeeded", "Failed"}:
        return False
    return state is None or state in _OVER or (state not in _CANCELLED and not flow_job)


def must_not_start(state: StateType | None, flow_pods: Collection[str]) -> bool:
    """Return whether a flow run is over but its flow Job would start it again.

    The result is False while a pod runs, because either that pod will end the run itself, or the
    run was marked as crashed by mistake. The result is also False if a pod succeeded, because the
    Job is then about to end.
    """
    if {"Running", "Succeeded"} & set(flow_pods):
        return False
    return state in _CANCELLED or (state is StateType.CRASHED and "Pending" in flow_pods)


@dataclass
class Clocks:
    """A clock for each flow run whose Jobs are ownerless (see `ownerless`)."""

    grace_s: float
    _since_s: dict[str, tuple[StateType | None, float]] = field(default_factory=dict)

    def due(self, ownerless: Mapping[str, StateType | None], now_s: float) -> set[str]:
        """Update the clocks after a check; return the runs whose grace period is over.

        A run's clock starts again when its state changes.
        """
        before, self._since_s = self._since_s, {}
        for run, state in ownerless.items():
            known = before.get(run)
            if known is None or known[0] is not state:
                known = (state, now_s)
                log.info(
                    "flow run %s is %s and has no flow pod; its Jobs will be deleted in %.0f s "
                    "unless its state changes",
                    run,
                    _shown(state),
                    self.grace_s,
                )
            self._since_s[run] = known
        return {
            run for run, (_, since_s) in self._since_s.items() if now_s - since_s >= self.grace_s
        }

    def restart(self) -> None:
        """Reset all clocks, because a change of state may have been missed."""
        self._since_s.clear()


@dataclass
class Janitor:
    """A janitor, which checks at intervals and deletes the Jobs that are due."""

    api: Api
    instance: str
    work_pool: str
    clocks: Clocks
    _outage: bool = False

    def run(self, interval_s: float, stop: threading.Event) -> None:
        """Check every `interval_s` seconds until `stop` is set."""
        while not stop.is_set():
            try:
                self.look(time.monotonic())
                if self._outage:
                    log.info("Prefect and Kubernetes answer again")
                self._outage = False
            except (PrefectApiError, ApiUnavailableError, LaunchError) as error:
                self.clocks.restart()
                if not self._outage:
                    log.warning("deleting no Jobs until Prefect and Kubernetes answer: %s", error)
                self._outage = True
            ALIVE.touch()
            stop.wait(interval_s)

    def look(self, now_s: float) -> None:
        """Check once, and delete the Jobs that are due.

        Raises PrefectApiError, ApiUnavailableError or LaunchError.
        """
        jobs = self._unfinished(
            {names.MANAGED_BY: names.RETRACE, names.INSTANCE: self.instance}, names.FLOW_RUN
        )
        flow_jobs = self._unfinished(
            {_WORK_POOL_OF_FLOW_JOB: self.work_pool}, names.FLOW_RUN_OF_FLOW_POD
        )
        # States are read after Jobs, so a run that restarts between the two reads counts as alive.
        states = flow_run_states({*jobs, *flow_jobs})
        alone: dict[str, StateType | None] = {}
        for run, state in states.items():
            if state in _CANCELLED:  # without a grace period
                self._delete(jobs.get(run, []), run, state)
            if state is None or state in _CANCELLED | _OVER or run not in flow_jobs:
                pods = self._phases(run)
                if must_not_start(state, pods):
                    self._delete(flow_jobs.get(run, []), run, state)
                if run in jobs and ownerless(state, pods, run in flow_jobs):
                    alone[run] = state
        for run in self.clocks.due(alone, now_s):
            self._delete(jobs[run], run, alone[run])

    def _unfinished(self, labels: Mapping[str, str], owner: str) -> dict[str, list[str]]:
        """Return the names of unfinished Jobs, keyed by the flow run in the label `owner`."""
        found: dict[str, list[str]] = {}
        for job in self.api.jobs(labels):
            if not has_ended(job):
                metadata = job["metadata"]
                found.setdefault(metadata["labels"].get(owner, ""), []).append(metadata["name"])
        return found

    def _phases(self, run: str) -> list[str]:
        pods = self.api.pods({names.FLOW_RUN_OF_FLOW_POD: run})
        return [pod["status"].get("phase", "Unknown") for pod in pods]

    def _delete(self, jobs: Iterable[str], run: str, state: StateType | None) -> None:
        for job in jobs:
            self.api.delete_job(job)
            log.info("deleted Job %s: flow run %s is %s", job, run, _shown(state))


def flow_run_states(runs: Collection[str]) -> dict[str, StateType | None]:
    """Return the states of flow runs; None for runs that Prefect does not know.

    Raises PrefectApiError.
    """
    states: dict[str, StateType | None] = dict.fromkeys(sorted(runs))
    ids = [run for run in states if _is_id(run)]
    for start in range(0, len(ids), _PAGE):
        wanted = FlowRunFilterId(any_=[UUID(run) for run in ids[start : start + _PAGE]])
        with prefect_api() as client:
            for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(id=wanted), limit=_PAGE):
                states[str(run.id)] = run.state_type
    return states


def main() -> int:
    """Check at intervals until SIGTERM, and return the exit code."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        cluster = read_cluster()
        interval_s = _seconds("RETRACE_JANITOR_INTERVAL_S", 5)
        clocks = Clocks(_seconds("RETRACE_JANITOR_ORPHAN_GRACE_S", 900))
        janitor = Janitor(Api(cluster.namespace), cluster.instance, work_pool_name(), clocks)
    except (InputError, LaunchError) as error:
        log.error("%s", error)
        return 1
    log.info("checking every %.0f s", interval_s)
    janitor.run(interval_s, stop)
    return 0


def _is_id(run: str) -> bool:
    try:
        return str(UUID(run)) == run
    except ValueError:
        return False


def _shown(state: StateType | None) -> str:
    return "unknown to Prefect" if state is None else state.value.lower()


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(
            [f"{variable}: found {text!r}, expected a number of seconds above 0; correct it"]
        )
    return seconds


if __name__ == "__main__":
    log_to_stderr()
    raise SystemExit(main())
