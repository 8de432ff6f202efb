"""The launcher's reactions to the API server's answers and outages.

The tests replace the API object with a small in-memory one; tests/e2e uses a real cluster.
"""

import copy
import dataclasses

import pytest

from pipeline.launch.base import LaunchError, StageFailedError
from pipeline.launch.kubernetes import names, workers
from pipeline.launch.kubernetes.api import ApiUnavailableError
from pipeline.launch.kubernetes.workers import KubernetesWorkers
from tests.unit.launch.test_kubernetes_jobs import launch


class Server:
    """Jobs, pods and Services of a namespace. The first `silent` requests fail."""

    def __init__(self) -> None:
        self.objects: dict[str, dict] = {}
        self.services: list[str] = []
        self.pod_list: list[dict] = []
        self.log = "INFO fine\nERROR no expert left\n"
        self.logs: dict[str, str] = {}
        """Logs of individual pods; the log of all other pods is `log`."""
        self.silent = 0
        self.refuses = ""

    def _ask(self) -> None:
        if self.silent:
            self.silent -= 1
            raise ApiUnavailableError("503")

    def jobs(self, labels: dict) -> list[dict]:
        self._ask()
        return copy.deepcopy(list(self.objects.values()))

    def pods(self, labels: dict) -> list[dict]:
        return copy.deepcopy(self.pod_list)

    def create_job(self, job: dict) -> bool:
        self._ask()
        name = job["metadata"]["name"]
        if self.refuses and self.refuses in name:
            raise LaunchError(f"Kubernetes refuses to create Job {name}: exceeded quota")
        new = name not in self.objects
        if new:
            self.objects[name] = copy.deepcopy(job)
            self.objects[name]["metadata"]["uid"] = f"uid of {name}"
        return new

    def create_service(self, service: dict) -> bool:
        self._ask()
        self.services.append(service["metadata"]["name"])
        return True

    def delete_job(self, name: str) -> None:
        self.objects.pop(name, None)

    def last_warning(self, name: str) -> str | None:
        return None

    def log_tail(self, pod: str, lines: int) -> str:
        return self.logs.get(pod, self.log)

    def fail(self, name: str, exit_code: int = 1) -> None:
        """Fail a Job whose only pod ended with an exit code."""
        self._end(name, "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        terminated = {"terminated": {"exitCode": exit_code}}
        self.pod_list.append(self._pod(name, "Failed", terminated, []))

    def take_away(self, name: str) -> None:
        """Evict a Job's only pod, which keeps running during its grace period."""
        condition = {"type": "DisruptionTarget", "status": "True", "message": "Eviction API: evict"}
        self.pod_list = [self._pod(name, "Running", {"running": {}}, [condition])]

    def lose(self, name: str, seen_by_job: bool) -> None:
        """Remove a disrupted pod and fail its Job."""
        self.pod_list = []
        if seen_by_job:
            message = f"Pod {name} has condition DisruptionTarget matching FailJob rule at index 0"
            self._end(name, "PodFailurePolicy", message)
        else:
            self._end(name, "BackoffLimitExceeded", "Job has reached the specified backoff limit")

    def _end(self, name: str, reason: str, message: str) -> None:
        failed = {"type": "Failed", "status": "True", "reason": reason, "message": message}
        self.objects[name]["status"] = {"conditions": [failed]}

    def _pod(self, name: str, phase: str, state: dict, conditions: list[dict]) -> dict:
        return {
            "metadata": {
                "name": f"{name}-0-abcde",
                "uid": f"pod of {name}",
                "labels": {**self.objects[name]["metadata"]["labels"], names.JOB_OF_POD: name},
                "annotations": {names.INDEX_OF_POD: "0"},
            },
            "status": {
                "phase": phase,
                "conditions": conditions,
                "containerStatuses": [{"name": "training", "state": state}],
            },
        }


class Screen:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def phase(self, who: str, what: str | None) -> None:
        self.lines.append(f"{who}: {what}")

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(workers, "_BACK_OFF_S", 0.0)


@pytest.fixture
def server() -> Server:
    return Server()


def started(server: Server) -> KubernetesWorkers:
    made = KubernetesWorkers(launch(), server, Screen(), lambda: "training step 0 again")
    made.start()
    return made


def gangs(server: Server) -> list[str]:
    return sorted(name[-7:] for name in server.objects if "-train-" in name)


def test_a_second_launcher_attaches(server: Server):
    started(server)
    before = copy.deepcopy(server.objects)
    again = started(server)
    assert server.objects == before
    assert sum("attached to Job" in line for line in again.screen.lines) == 2


def test_a_lost_gang_is_followed_by_the_next_one(server: Server):
    """The next gang has a Service; the restart counts, and the failed pod is shown once."""
    made = started(server)
    [first] = [name for name in server.objects if "-train-" in name]
    server.fail(first)
    made.check()
    made.check()
    assert gangs(server) == ["train-0", "train-1"]
    [told] = [line for line in made.screen.lines if "failed: exit code 1" in line]
    assert "| ERROR no expert left" in told
    assert made.screen.lines.count("training step 0 again") == 1
    latest = next(job for name, job in server.objects.items() if name.endswith("-train-1"))
    assert latest["metadata"]["annotations"][names.RESTARTS] == "1"
    assert latest["metadata"]["name"] in server.services


@pytest.mark.parametrize("seen_by", ["the Job", "the launcher"])
def test_the_eviction_of_a_gang_does_not_count_as_a_restart(server: Server, seen_by: str):
    """The evicted pod disappears before its Job has failed."""
    made = started(server)
    name = next(name for name in server.objects if "-train-" in name)
    if seen_by == "the launcher":
        server.take_away(name)
        made.check()
        made.check()
        [told] = [line for line in made.screen.lines if "is being disrupted" in line]
        pod = f"training node 0 (pod {name}-0-abcde)"
        assert told == f"{pod} is being disrupted: Eviction API: evict"
    server.lose(name, seen_by == "the Job")
    made.check()
    latest = next(job for name, job in server.objects.items() if name.endswith("-train-1"))
    assert latest["metadata"]["annotations"][names.RESTARTS] == "0"
    assert any("a disruption does not count" in line for line in made.screen.lines)


def test_the_run_fails_when_gangs_fail_too_often(server: Server):
    made = started(server)
    for _ in range(2):  # launch.max_restarts of the test's run
        server.fail(max(name for name in server.objects if "-train-" in name))
        made.check()
    server.fail(max(name for name in server.objects if "-train-" in name))
    with pytest.raises(StageFailedError, match="no expert left"):
        made.check()
    with pytest.raises(StageFailedError):  # the error is raised in every waiting thread
        made.check()
    assert gangs(server) == ["train-0", "train-1", "train-2"]


@pytest.mark.parametrize("where", ["exit code", "torchrun's report"])
def test_a_gang_with_a_configuration_error_is_not_restarted(server: Server, where: str):
    made = started(server)
    if where == "torchrun's report":
        server.log = "ERROR 403\ntorch.distributed.elastic ...\n  exitcode  : 78 (pid: 7)\n"
    name = next(name for name in server.objects if "-train-" in name)
    server.fail(name, 78 if where == "exit code" else 1)
    with pytest.raises(StageFailedError):
        made.check()
    assert gangs(server) == ["train-0"]


def test_an_outage_of_the_api_server_does_not_fail_the_run(server: Server):
    made = started(server)
    server.silent = 2
    assert not made.check()
    assert not made.check()
    made.check()
    told = [line for line in made.screen.lines if "Kubernetes API" in line]
    assert [line.partition(":")[0] for line in told] == [
        "the Kubernetes API is not responding; waiting for it",
        "the Kubernetes API is responding again",
    ]


def test_a_service_that_could_not_be_created_is_created_later(server: Server):
    """Without the Service, the ranks would never find each other."""
    made = started(server)
    server.fail(next(name for name in server.objects if "-train-" in name))
    made.check()  # creates the next gang
    server.silent = 1
    made.check()
    assert not any(name.endswith("-train-1") for name in server.services)
    made.check()
    assert any(name.endswith("-train-1") for name in server.services)


def test_created_jobs_are_deleted_if_a_later_one_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    server.refuses = "train"
    monkeypatch.setattr(workers, "Api", lambda namespace: server)
    with (
        pytest.raises(LaunchError, match="exceeded quota"),
        workers.kubernetes_workers(launch(), Screen()),
    ):
        pass
    assert not server.objects


def test_jobs_of_an_earlier_attempt_are_deleted_first(server: Server):
    old = launch()
    earlier = dataclasses.replace(old, attempt=dataclasses.replace(old.attempt, number=2))
    KubernetesWorkers(earlier, server, Screen()).start()
    started(server)
    assert all("-3-" in name for name in server.objects)


def test_a_deleted_job_fails_the_run_after_a_delay(server: Server, monkeypatch: pytest.MonkeyPatch):
    """When a run is cancelled, its Jobs are deleted before its flow ends."""
    made = started(server)
    server.objects.clear()
    made.check()
    monkeypatch.setattr(workers, "_MISSING_S", -1.0)
    with pytest.raises(StageFailedError, match="was deleted by a user or a program"):
        made.check()


def test_after_detaching_check_fails_and_no_job_is_deleted(server: Server):
    made = started(server)
    assert made.detach()
    with pytest.raises(StageFailedError):
        made.check()
    assert len(server.objects) == 2
