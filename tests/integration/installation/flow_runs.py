"""Flow runs of a deployment, in the states that Prefect's worker and flow pods would set."""

from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import uuid4

from tests.prefect_server import PrefectServer


@dataclass(frozen=True)
class FlowRuns:
    """The flow runs of one deployment."""

    server: PrefectServer
    deployment: str

    def create(self, state: str, name: str | None = None) -> str:
        """Create a flow run, set its state, and return its id."""
        body = {"parameters": {"run_name": "a"}, "enforce_parameter_schema": False}
        made = self.server.query(f"/deployments/{self.deployment}/create_flow_run", body)
        if state == "CANCELLING":  # Prefect cancels a scheduled run without this state
            self.set(made["id"], "RUNNING")
        if state != "SCHEDULED":
            self.set(made["id"], state, name)
        return str(made["id"])

    def set(self, run: str, state: str, name: str | None = None) -> None:
        """Force a flow run into a state.

        Args:
            run: The flow run's id.
            state: The state's type.
            name: The state's name; by default, the capitalised type.
        """
        body = {"type": state, "name": name or state.capitalize()}
        answer = self.server.query(f"/flow_runs/{run}/set_state", {"state": body, "force": True})
        assert answer["status"] == "ACCEPT", answer

    def state(self, run: str) -> tuple[str, str]:
        """Return the name and the message of a flow run's state."""
        state = self.server.query(f"/flow_runs/{run}")["state"]
        return state["name"], state["message"] or ""

    def heartbeat(self, run: str) -> None:
        """Send the event that Prefect's engine sends every 30 s."""
        event = {
            "id": str(uuid4()),
            "occurred": datetime.now(UTC).isoformat(),
            "event": "prefect.flow-run.heartbeat",
            "resource": {"prefect.resource.id": f"prefect.flow-run.{run}"},
            "related": [
                {
                    "prefect.resource.id": f"prefect.deployment.{self.deployment}",
                    "prefect.resource.role": "deployment",
                }
            ],
        }
        self.server.query("/events", [event])
