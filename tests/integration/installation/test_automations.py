"""The rules (automations) in a real Prefect server, with short times."""

import time
from uuid import UUID

import pytest
from prefect import flow
from prefect.deployments.runner import RunnerDeployment

from pipeline.installation.automations import automations, owner_of, register_automations, silence_s
from pipeline.installation.programs import prefect_api
from pipeline.installation.register import register
from tests.integration.installation.flow_runs import FlowRuns
from tests.integration.installation.installation import Installation
from tests.patience import PATIENCE_S, eventually
from tests.prefect_server import PrefectServer

pytestmark = pytest.mark.integration

START_S = 10
"""The shortest time that Prefect allows."""
SILENT_S = 30
"""Longer than any pause between the heartbeats that these tests send."""


@flow(name="retrace")
def stand_in(run_name: str) -> None: ...


@pytest.fixture
def runs(installation: Installation, server: PrefectServer) -> FlowRuns:
    """Return the flow runs of a deployment whose rules have short times."""
    register(stand_in, PATIENCE_S)
    [found] = server.query(
        "/deployments/filter", {"work_pools": {"name": {"any_": [installation.pool]}}}
    )
    made = FlowRuns(server, str(found["id"]))
    set_rules(made, START_S, SILENT_S)
    return made


def set_rules(runs: FlowRuns, start_timeout_s: int, silent_s: int) -> None:
    """Replace the rules of a deployment.

    Args:
        runs: The deployment's flow runs.
        start_timeout_s: Seconds within which a flow pod must start.
        silent_s: Seconds after which a silent flow run counts as lost.
    """
    with prefect_api() as client:
        client.delete_resource_owned_automations(owner_of(UUID(runs.deployment)))
        for rule in automations(UUID(runs.deployment), "a", start_timeout_s, silent_s):
            client.create_automation(rule)


@pytest.fixture
def others(runs: FlowRuns, installation: Installation, server: PrefectServer) -> FlowRuns:
    """Return the flow runs of a deployment without rules."""
    other = RunnerDeployment.from_flow(stand_in, "other", work_pool_name=installation.pool)
    return FlowRuns(server, str(other.apply()))


def is_found(runs: FlowRuns, run: str) -> None:
    """Send heartbeats until the rules set the flow run to Running again."""

    def sends_heartbeats_and_runs() -> bool:
        runs.heartbeat(run)
        return runs.state(run)[0] == "Running"

    eventually(sends_heartbeats_and_runs, lambda: runs.state(run))
    assert "it was never lost" in runs.state(run)[1]


def test_the_silence_covers_the_restart_of_a_flow_pod():
    """silence_s sums heartbeat (30 s), grace (10 s), back-off (40 s), margin (10 s) and start."""
    assert silence_s(600) == 690


def test_a_silent_flow_run_is_lost_and_found(runs: FlowRuns, others: FlowRuns):
    silent, alive = runs.create("RUNNING"), runs.create("RUNNING")
    foreign, done = others.create("RUNNING"), runs.create("RUNNING")
    others.heartbeat(foreign)
    runs.set(done, "FAILED", "Refused")
    for run in (silent, alive):
        runs.heartbeat(run)

    def silent_is_lost() -> bool:
        runs.heartbeat(alive)
        return runs.state(silent)[0] == "Crashed"

    eventually(silent_is_lost, lambda: runs.state(silent))
    assert "The flow pod was silent for 30 s and was not replaced" in runs.state(silent)[1]
    assert runs.state(alive)[0] == "Running"
    assert others.state(foreign)[0] == "Running"
    assert runs.state(done)[0] == "Refused"

    runs.heartbeat(silent)
    time.sleep(2)
    assert runs.state(silent)[0] == "Crashed", "one heartbeat is not enough: it may be a late one"
    is_found(runs, silent)


def test_a_flow_run_whose_pod_does_not_start_is_crashed(runs: FlowRuns, others: FlowRuns):
    stuck, started = runs.create("PENDING"), runs.create("PENDING")
    foreign = others.create("PENDING")
    runs.set(stuck, "PENDING", "InfrastructurePending")
    runs.set(started, "RUNNING")

    def stuck_has_crashed() -> bool:
        runs.heartbeat(started)
        return runs.state(stuck)[0] == "Crashed"

    eventually(stuck_has_crashed, lambda: runs.state(stuck))
    assert "did not start within 10 s" in runs.state(stuck)[1]
    assert "kubectl describe pods" in runs.state(stuck)[1]
    assert runs.state(started)[0] == "Running"
    assert others.state(foreign)[0] == "Pending"


def rules_of(installation: Installation, server: PrefectServer) -> tuple[UUID, dict[str, str]]:
    """Return the deployment's id, and the names of its rules, keyed by the rules' ids."""
    [found] = server.query(
        "/deployments/filter", {"work_pools": {"name": {"any_": [installation.pool]}}}
    )
    deployment = UUID(found["id"])
    rules = server.query(f"/automations/related-to/{owner_of(deployment)}")
    return deployment, {rule["id"]: rule["name"] for rule in rules}


def test_registering_again_keeps_the_rules(installation: Installation, server: PrefectServer):
    """A newly created rule would not have received the earlier events of running flow runs."""
    register(stand_in, PATIENCE_S)
    deployment, rules = rules_of(installation, server)
    assert len(rules) == 3
    register(stand_in, PATIENCE_S)
    assert rules_of(installation, server) == (deployment, rules)


def test_changed_times_replace_the_rules(installation: Installation, server: PrefectServer):
    register(stand_in, PATIENCE_S)
    deployment, rules = rules_of(installation, server)
    with prefect_api() as client:
        register_automations(client, deployment, "renamed", 1200)
    _, renamed = rules_of(installation, server)
    assert len(renamed) == 3
    assert not set(renamed) & set(rules)
    assert all(name.startswith("renamed: ") for name in renamed.values())
