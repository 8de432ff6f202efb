"""Start and watch runs through Prefect's REST API, as the UI does."""

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

# The smallest useful size of the quickstart, as in tests/integration/run/retrace_runs.py: 2 rollout
# pods and 2 training pods are the preset's. One thread each, for all share two cores.
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
# More processors than any node has: pods that never start, so no engine is loaded.
NO_ROLLOUT = "launch.kubernetes.rollout.cpu='9999'"
NO_TRAINING = "launch.kubernetes.training.cpu='9999'"


class RefusedError(Exception):
    """The API refused a request; the text is its answer."""


@dataclass
class Prefect:
    """The API of an installation's server."""

    url: str
    """Of the server, without /api."""
    auth: str
    """user:password."""
    _deployment: str | None = field(default=None, init=False)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """One request, repeated while the server cannot be reached. Raises RefusedError."""
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
                said = f"{method} {path}: {error.code} {error.read().decode()}"
                if error.code < 500:
                    raise RefusedError(said) from error
            except (OSError, http.client.HTTPException) as error:
                said = repr(error)
            assert time.monotonic() < deadline_s, f"the Prefect server does not answer: {said}"
            time.sleep(0.5)

    def deployment(self) -> dict[str, Any]:
        """The deployment retrace/retrace."""
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
        """Start a run as the form does. Raises RefusedError."""
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
        made = self.call("POST", f"/deployments/{self._deployment}/create_flow_run", body)
        return FlowRun(self, name, made["id"])

    def flow_runs(self) -> list[str]:
        """Ids of all flow runs."""
        return sorted(run["id"] for run in self.call("POST", "/flow_runs/filter", {}))


@dataclass(frozen=True)
class FlowRun:
    """One flow run."""

    prefect: Prefect
    name: str
    """Of the Retrace run."""
    id: str

    @property
    def state(self) -> dict[str, Any]:
        """Its state now: type, name, message, timestamp."""
        state: dict[str, Any] = self.prefect.call("GET", f"/flow_runs/{self.id}")["state"]
        return state

    def at_work(self) -> bool:
        """True; AssertionError once it has ended."""
        assert self.state["type"] not in FINAL, f"{self.name} has ended: {self.describe()}"
        return True

    def end(self, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Its final state."""

        def look() -> dict[str, Any] | None:
            state = self.state
            return state if state["type"] in FINAL else None

        return eventually(look, lambda: f"the end of {self.name}: {self.describe()}", within_s)

    def completes(self, within_s: float = PATIENCE_S) -> None:
        """Wait for its end, which must be COMPLETED."""
        state = self.end(within_s)
        assert state["type"] == "COMPLETED", self.describe()

    def cancel(self) -> None:
        """What the UI's Cancel does."""
        body = {"state": {"type": "CANCELLING", "name": "Cancelling"}, "force": False}
        answer = self.prefect.call("POST", f"/flow_runs/{self.id}/set_state", body)
        # A run that has not been submitted yet is cancelled at once.
        assert answer["state"]["type"] in ("CANCELLING", "CANCELLED"), answer

    def logs(self) -> list[dict[str, Any]]:
        """Its log, and that of its tasks."""
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
        """The messages of its log."""
        return "\n".join(line["message"] for line in self.logs())

    def says(self, text: str) -> dict[str, Any]:
        """The first line of its log that contains a text."""

        def look() -> dict[str, Any] | None:
            return next((line for line in self.logs() if text in line["message"]), None)

        return eventually(look, lambda: f"{text!r} in the log: {self.describe()}")

    def artifacts(self) -> dict[str, dict[str, Any]]:
        """The newest of its artifacts under each key."""
        body = {"artifacts": {"flow_run_id": {"any_": [self.id]}}}
        found = self.prefect.call("POST", "/artifacts/latest/filter", body)
        return {artifact["key"]: artifact for artifact in found}

    def describe(self) -> str:
        """State and log, for the message of a test that failed."""
        state = self.state
        return f"{state['name']}: {state['message']}\n{self.log_text()[-6000:]}"
