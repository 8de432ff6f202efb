"""The rules at work in a real Prefect server, with short times."""

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
"""The shortest that Prefect allows."""
SILENT_S = 30
"""Longer than any pause between the heartbeats that these tests send."""


@flow(name="retrace")
def stand_in(run_name: str) -> None: ...


@pytest.fixture
def runs(installation: Installation, server: PrefectServer) -> FlowRuns:
    """Of a deployment whose rules are impatient."""
    register(stand_in, PATIENCE_S)
    [found] = server.query(
        "/deployments/filter", {"work_pools": {"name": {"any_": [installation.pool]}}}
    )
    made = FlowRuns(server, str(found["id"]))
    set_rules(made, START_S, SILENT_S)
    return made


def set_rules(runs: FlowRuns, start_timeout_s: int, silent_s: int) -> None:
    with prefect_api() as client:
        client.delete_resource_owned_automations(owner_of(UUID(runs.deployment)))
        for rule in automations(UUID(runs.deployment), "a", start_timeout_s, silent_s):
            client.create_automation(rule)


@pytest.fixture
def others(runs: FlowRuns, installation: Installation, server: PrefectServer) -> FlowRuns:
    """Of a deployment without rules."""
    other = RunnerDeployment.from_flow(stand_in, "other", work_pool_name=installation.pool)
    return FlowRuns(server, str(other.apply()))


def is_found(runs: FlowRuns, run: str) -> None:
    def sends_heartbeats_and_runs() -> bool:
        runs.heartbeat(run)
        return runs.state(run)[0] == "Running"

    eventually(sends_heartbeats_and_runs, lambda: runs.state(run))
    assert "it was never lost" in runs.state(run)[1]


def test_the_silence_covers_a_flow_pod_that_comes_back():
    """10 s of grace and at most 40 s of back-off after a heartbeat, then a start like any other."""
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
    assert "Nothing was heard of the flow pod for 30 s" in runs.state(silent)[1]
    assert runs.state(alive)[0] == "Running"
    assert others.state(foreign)[0] == "Running"
    assert runs.state(done)[0] == "Refused"

    runs.heartbeat(silent)
    time.sleep(2)
    assert runs.state(silent)[0] == "Crashed", "one heartbeat may have been on its way"
    is_found(runs, silent)


def test_a_flow_pod_that_does_not_start(runs: FlowRuns, others: FlowRuns):
    stuck, started = runs.create("PENDING"), runs.create("PENDING")
    foreign = others.create("PENDING")
    runs.set(stuck, "PENDING", "InfrastructurePending")
    runs.set(started, "RUNNING")

    def stuck_is_told() -> bool:
        runs.heartbeat(started)
        return runs.state(stuck)[0] == "Crashed"

    eventually(stuck_is_told, lambda: runs.state(stuck))
    assert "did not start within 10 s" in runs.state(stuck)[1]
    assert "kubectl describe pods" in runs.state(stuck)[1]
    assert runs.state(started)[0] == "Running"
    assert others.state(foreign)[0] == "Pending"


def rules_of(installation: Installation, server: PrefectServer) -> tuple[UUID, dict[str, str]]:
    """The deployment, and its rules: their names by their ids."""
    [found] = server.query(
        "/deployments/filter", {"work_pools": {"name": {"any_": [installation.pool]}}}
    )
    deployment = UUID(found["id"])
    rules = server.query(f"/automations/related-to/{owner_of(deployment)}")
    return deployment, {rule["id"]: rule["name"] for rule in rules}


def test_registering_again_keeps_the_rules(installation: Installation, server: PrefectServer):
    """A rule that is made anew has not heard of the runs at work."""
    register(stand_in, PATIENCE_S)
    deployment, rules = rules_of(installation, server)
    assert len(rules) == 3
    register(stand_in, PATIENCE_S)
    assert rules_of(installation, server) == (deployment, rules)


def test_other_times_make_other_rules(installation: Installation, server: PrefectServer):
    register(stand_in, PATIENCE_S)
    deployment, rules = rules_of(installation, server)
    with prefect_api() as client:
        register_automations(client, deployment, "renamed", 1200)
    _, renamed = rules_of(installation, server)
    assert len(renamed) == 3
    assert not set(renamed) & set(rules)
    assert all(name.startswith("renamed: ") for name in renamed.values())
