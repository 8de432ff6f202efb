"""Schedules of the registered deployment, as users create them in Prefect's UI.

A process worker takes the place of Prefect's Kubernetes worker. It starts the flow in the same way.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.installation.installation import Installation, start_program
from tests.patience import PATIENCE_S, eventually
from tests.prefect_server import PrefectServer

pytestmark = pytest.mark.integration

YEARLY: list[dict[str, Any]] = [
    {"cron": "0 0 1 1 *", "timezone": "Europe/Berlin"},
    {"rrule": "FREQ=YEARLY"},
]


@pytest.fixture
def deployment(installation: Installation, server: PrefectServer) -> str:
    """Register the installation, and return the id of its deployment."""
    with start_program("pipeline.installation.register") as program:
        _, printed = program.communicate(timeout=PATIENCE_S)
    assert program.returncode == 0, printed
    pools = {"work_pools": {"name": {"any_": [installation.pool]}}}
    [found] = server.query("/deployments/filter", pools)
    return str(found["id"])


@pytest.fixture
def worker(installation: Installation) -> Iterator[None]:
    """Start a worker that runs flows as processes."""
    line = ["worker", "start", "--type=process", f"--pool={installation.pool}"]
    log = (installation.folder / "worker.log").open("wb")
    with (
        log,
        subprocess.Popen([sys.executable, "-m", "prefect", *line], stdout=log, stderr=log) as p,
    ):
        yield
        p.terminate()


def schedule(server: PrefectServer, deployment: str, when: dict[str, Any], run_name: str) -> str:
    """Create a schedule with parameters, and return its id."""
    parameters = {"preset": "quickstart", "run_name": run_name}
    body = [{"schedule": when, "active": True, "parameters": parameters}]
    [made] = server.query(f"/deployments/{deployment}/schedules", body)
    return str(made["id"])


def runs_of(server: PrefectServer, deployment: str, schedule: str) -> list[dict[str, Any]]:
    """Return the flow runs that Prefect's server created for a schedule, earliest first."""
    body = {"deployments": {"id": {"any_": [deployment]}}, "sort": "EXPECTED_START_TIME_ASC"}
    found: list[dict[str, Any]] = server.query("/flow_runs/filter", body)
    return [run for run in found if run["created_by"]["id"] == schedule]


def test_scheduled_runs_start(server: PrefectServer, deployment: str, worker: None):
    """Two runs that are due at the same time start under different names.

    The preset of the tests is incomplete, so the flow refuses its settings.
    """
    names = ("", "", "nightly")
    schedules = [schedule(server, deployment, {"interval": 20}, name) for name in names]

    def first_runs() -> list[dict[str, Any]]:
        return [run for one in schedules for run in runs_of(server, deployment, one)[:1]]

    def all_end() -> bool:
        return [run["state_name"] for run in first_runs()] == ["Refused"] * 3

    eventually(all_end, lambda: [(run["name"], run["state"]) for run in first_runs()])
    *generated, given = first_runs()
    for one in schedules:
        server.query(f"/deployments/{deployment}/schedules/{one}", method="DELETE")
    assert given["name"] == "nightly"
    for run in generated:
        assert re.fullmatch(rf"[a-z-]{{3,35}}-{run['id'][-4:]}", run["name"])
    assert len({run["name"] for run in generated}) == 2
    assert {run["run_count"] for run in first_runs()} == {1}


@pytest.mark.parametrize("when", YEARLY, ids=["cron", "rrule"])
def test_paused_schedules_have_no_runs(
    server: PrefectServer, deployment: str, when: dict[str, Any]
):
    made = schedule(server, deployment, when, "yearly")
    eventually(
        lambda: runs_of(server, deployment, made), lambda: server.query("/flow_runs/filter", {})
    )
    for run in runs_of(server, deployment, made):
        assert run["state_name"] == "Scheduled"
        assert run["parameters"] == {"preset": "quickstart", "run_name": "yearly"}
    server.query(f"/deployments/{deployment}/schedules/{made}", {"active": False}, "PATCH")
    eventually(lambda: not runs_of(server, deployment, made), lambda: made)
