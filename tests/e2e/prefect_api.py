"""Functions that start and watch runs through Prefect's REST API, as the UI does."""

import base64
import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.patience import PATIENCE_S, eventually

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
WAITING = {"SCHEDULED", "PENDING"}

# The smallest useful size of the quickstart, as in tests/integration/run/retrace_runs.py. The
# preset sets 2 rollout pods and 2 training pods. All pods share two cores, so each has one thread.
SMALL = (
    "trainer.test_freq=-1",
    "data.val_files=null",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "launch.threads_per_worker=1",
)
# One pod of each kind.
SINGLE = ("launch.rollout_workers=1", "trainer.nnodes=1")
# Pods that request more processors than any node has. They never start, so no engine is loaded.
NO_ROLLOUT = "launch.kubernetes.rollout.cpu='9999'"
NO_TRAINING = "launch.kubernetes.training.cpu='9999'"


class RefusedError(Exception):
    """The API refused a request; the message contains the response."""


@dataclass
class Prefect:
    """The API of an installation's Prefect server."""

    url: str
    """The server's URL, without /api."""
    auth: str
    """user:password."""
    _deployment: str | None = field(default=None, init=False)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request, and repeat it while the server cannot be reached.

        Args:
            method: The HTTP method.
            path: The path below /api.
            body: The request's content, which is sent as JSON; None for no content.

        Returns:
            The parsed JSON of the response; None if the response is empty.

        Raises:
            RefusedError: The API refused the request.
        """
        request = urllib.request.Request(
            f"{self.url}/api{path}",
            None if body is None else json.dumps(body).encode(),
            {
                "Content-Type": "application/json",
                "Authorization": f"Basic {base64.b64encode(self.auth.encode()).decode()}",
            },
            method=method,
        )
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                reason = f"{method} {path}: {error.code} {error.read().decode()}"
                if error.code < 500:
                    raise RefusedError(reason) from error
            except (OSError, http.client.HTTPException) as error:
                reason = repr(error)
            assert time.monotonic() < deadline_s, f"the Prefect server does not answer: {reason}"
            time.sleep(0.5)

    def deployment(self) -> dict[str, Any]:
        """Return the deployment retrace/retrace."""
        found: dict[str, Any] = self.call("GET", "/deployments/name/retrace/retrace")
        return found

    def start(
        self,
        name: str,
        overrides: Sequence[str] = (),
        *,
        steps: int | None = None,
        preset: str = "quickstart",
        job_variables: dict[str, str] | None = None,
    ) -> "FlowRun":
        """Start a run as the form does.

        Args:
            name: The run's name.
            overrides: Settings as key.path=value.
            steps: The number of training steps; None for the preset's default.
            preset: The preset's name.
            job_variables: Job variables that override the defaults for the flow's Job.

        Returns:
            The scheduled flow run.

        Raises:
            RefusedError: The API refused the parameters.
        """
        if self._deployment is None:
            self._deployment = self.deployment()["id"]
        body = {
            "parameters": {
                "preset": preset,
                "run_name": name,
                "steps": steps,
                "overrides": list(overrides),
            },
            "state": {"type": "SCHEDULED"},
            "job_variables": job_variables or {},
        }
        created = self.call("POST", f"/deployments/{self._deployment}/create_flow_run", body)
        return FlowRun(self, name, created["id"])

    def start_by_schedule(self, overrides: Sequence[str]) -> "FlowRun":
        """Create a schedule as the UI does, and delete it when its first run has started.

        Args:
            overrides: Settings as key.path=value. The schedule has no name for its runs.
        """
        path = f"/deployments/{self.deployment()['id']}/schedules"
        parameters = {"preset": "quickstart", "overrides": list(overrides)}
        body = [{"schedule": {"interval": 20}, "active": True, "parameters": parameters}]
        [schedule] = self.call("POST", path, body)

        def runs() -> list[dict[str, Any]]:
            found = self.call("POST", "/flow_runs/filter", {"sort": "EXPECTED_START_TIME_ASC"})
            return [run for run in found if (run["created_by"] or {}).get("id") == schedule["id"]]

        def first() -> dict[str, Any] | None:
            return next((run for run in runs() if run["state_type"] not in WAITING), None)

        run = eventually(first, lambda: f"a run of the schedule: {runs()[:3]}")
        self.call("DELETE", f"{path}/{schedule['id']}")
        return FlowRun(self, run["name"], run["id"])

    def flow_runs(self) -> list[str]:
        """Return the sorted ids of all flow runs."""
        return sorted(run["id"] for run in self.call("POST", "/flow_runs/filter", {}))


@dataclass(frozen=True)
class FlowRun:
    """One flow run."""

    prefect: Prefect
    name: str
    """The Retrace run's name."""
    id: str

    @property
    def state(self) -> dict[str, Any]:
        """The run's current state: type, name, message, timestamp."""
        state: dict[str, Any] = self.prefect.call("GET", f"/flow_runs/{self.id}")["state"]
        return state

    def at_work(self) -> bool:
        """Return True. Raises AssertionError if the run has ended."""
        assert self.state["type"] not in FINAL, f"{self.name} has ended: {self.describe()}"
        return True

    def end(self, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Wait for the run's final state and return it."""

        def look() -> dict[str, Any] | None:
            state = self.state
            return state if state["type"] in FINAL else None

        return eventually(look, lambda: f"the end of {self.name}: {self.describe()}", within_s)

    def completes(self, within_s: float = PATIENCE_S) -> None:
        """Wait for the run's final state, which must be COMPLETED."""
        state = self.end(within_s)
        assert state["type"] == "COMPLETED", self.describe()

    def cancel(self) -> None:
        """Cancel the run, as the UI's Cancel button does."""
        body = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
        answer = self.prefect.call("POST", f"/flow_runs/{self.id}/set_state", body)
        # Prefect immediately cancels a run that has not been submitted yet.
        assert answer["state"]["type"] in ("CANCELLING", "CANCELLED"), answer

    def logs(self) -> list[dict[str, Any]]:
        """Return the log lines of the run and its tasks, oldest first."""
        found: list[dict[str, Any]] = []
        while True:
            body = {
                "logs": {"flow_run_id": {"any_": [self.id]}},
                "sort": "TIMESTAMP_ASC",
                "limit": 200,
                "offset": len(found),
            }
            page = self.prefect.call("POST", "/logs/filter", body)
            found += page
            if len(page) < 200:
                return found

    def log_text(self) -> str:
        """Return the messages of the run's log, one per line."""
        return "\n".join(line["message"] for line in self.logs())

    def says(self, text: str) -> dict[str, Any]:
        """Wait for a log line that contains a text, and return the first one."""

        def look() -> dict[str, Any] | None:
            return next((line for line in self.logs() if text in line["message"]), None)

        return eventually(look, lambda: f"{text!r} in the log: {self.describe()}")

    def artifacts(self) -> dict[str, dict[str, Any]]:
        """Return the run's newest artifact for each key."""
        body = {"artifacts": {"flow_run_id": {"any_": [self.id]}}}
        found = self.prefect.call("POST", "/artifacts/latest/filter", body)
        return {artifact["key"]: artifact for artifact in found}

    def describe(self) -> str:
        """Return the run's state and the end of its log, for a test's failure message."""
        state = self.state
        return f"{state['name']}: {state['message']}\n{self.log_text()[-6000:]}"
