"""Registration with a real Prefect server and a real S3 server."""

import json
import logging
import urllib.error
from typing import Any

import boto3
import pytest
from prefect import flow

from pipeline.installation.register import main, make_store, register
from pipeline.store import open_store
from tests.integration.installation.installation import IMAGE, TEMPLATE, Installation, start_program
from tests.minio import minio, s3_uri
from tests.patience import PATIENCE_S
from tests.prefect_server import PrefectServer

__all__ = ["minio", "s3_uri"]

pytestmark = pytest.mark.integration


@flow(name="retrace")
def stand_in(run_name: str, steps: int | None = None) -> None: ...


def deployments(server: PrefectServer, pool: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.query(
        "/deployments/filter", {"work_pools": {"name": {"any_": [pool]}}}
    )
    return found


def automations(server: PrefectServer, pool: str) -> dict[str, dict[str, Any]]:
    found = server.query("/automations/filter", {})
    return {a["name"]: a for a in found if a["name"].startswith(f"retrace/{pool}: ")}


def only_error(caplog: pytest.LogCaptureFixture) -> str:
    """Return the message of the only error, which must be one line."""
    [record] = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "\n" not in record.getMessage()
    return record.getMessage()


def test_registration_works_as_in_the_init_container(
    installation: Installation, server: PrefectServer
):
    wait_s = ("--wait-s", str(PATIENCE_S))
    with start_program("pipeline.installation.register", *wait_s) as program:
        _, printed = program.communicate(timeout=2 * PATIENCE_S)
    assert program.returncode == 0, printed
    pool = server.query(f"/work_pools/{installation.pool}")
    assert pool["type"] == "kubernetes"
    assert pool["base_job_template"] == TEMPLATE
    assert pool["concurrency_limit"] == 3
    [deployment] = deployments(server, installation.pool)
    assert deployment["name"] == installation.pool
    assert deployment["entrypoint"] == "pipeline.flows.cluster.retrace"
    assert deployment["job_variables"] == {"image": IMAGE}
    assert deployment["pull_steps"] in (None, [])
    assert deployment["tags"] == ["retrace"]
    # With a limit (a lease), Prefect would end runs after a restart of the server.
    assert deployment["global_concurrency_limit"] is None
    form = deployment["parameter_openapi_schema"]["properties"]
    assert form["preset"]["enum"] == ["quickstart"]
    assert all(field["description"] for field in form.values())
    names = [f"retrace/{installation.pool}: {what} flow pod" for what in ("found", "lost", "stuck")]
    assert sorted(automations(server, installation.pool)) == names


def test_the_types_of_the_form_are_enforced(installation: Installation, server: PrefectServer):
    register(stand_in, PATIENCE_S)
    [deployment] = deployments(server, installation.pool)
    path = f"/deployments/{deployment['id']}/create_flow_run"
    with pytest.raises(urllib.error.HTTPError) as refused:
        server.query(path, {"parameters": {"run_name": "a", "steps": "many"}})
    assert refused.value.code in (409, 422)
    server.query(path, {"parameters": {"run_name": "a", "steps": 2}})


def test_a_second_registration_updates_the_deployment(
    installation: Installation, server: PrefectServer
):
    register(stand_in, PATIENCE_S)
    [first] = deployments(server, installation.pool)
    changed = {**TEMPLATE, "job_configuration": {"command": "{{ command }}"}}
    installation.template.write_text(json.dumps(changed))
    installation.set("RETRACE_FLOW_IMAGE", "elsewhere/flow@sha256:0")
    installation.set("RETRACE_MAX_RUNS", "7")
    installation.set("RETRACE_POD_START_TIMEOUT_S", "1200")
    register(stand_in, PATIENCE_S)
    [second] = deployments(server, installation.pool)
    assert second["id"] == first["id"]
    assert second["job_variables"] == {"image": "elsewhere/flow@sha256:0"}
    pool = server.query(f"/work_pools/{installation.pool}")
    assert pool["base_job_template"] == changed
    assert pool["concurrency_limit"] == 7
    rules = automations(server, installation.pool)
    assert len(rules) == 3
    assert rules[f"retrace/{installation.pool}: stuck flow pod"]["trigger"]["within"] == 1200


def test_two_installations_can_share_one_server(installation: Installation, server: PrefectServer):
    register(stand_in, PATIENCE_S)
    first, installation.pool = installation.pool, f"{installation.pool}-b"
    installation.namespace = "second"
    installation.write()
    register(stand_in, PATIENCE_S)
    ids = set()
    for pool in (first, installation.pool):
        [deployment] = deployments(server, pool)
        rules = automations(server, pool).values()
        assert len(rules) == 3
        for rule in rules:
            related = rule["trigger"]["match_related"]
            assert related["prefect.resource.id"] == f"prefect.deployment.{deployment['id']}"
        ids.add(deployment["id"])
    assert len(ids) == 2


def test_a_work_pool_of_another_installation_is_refused(
    installation: Installation, server: PrefectServer, caplog: pytest.LogCaptureFixture
):
    register(stand_in, PATIENCE_S)
    installation.namespace = "second"
    installation.write()
    assert main([]) == 1
    text = only_error(caplog)
    assert text.startswith("worker.workPool: ")
    assert "in namespace first" in text
    assert f"prefect work-pool delete {installation.pool}" in text


def test_a_wrong_password_is_reported(installation: Installation, caplog: pytest.LogCaptureFixture):
    from prefect.settings import PREFECT_API_AUTH_STRING, temporary_settings

    with temporary_settings({PREFECT_API_AUTH_STRING: "retrace:wrong"}):
        assert main([]) == 1
    text = only_error(caplog)
    assert "(401)" in text
    assert "prefect.auth of the chart" in text


def test_a_server_that_does_not_answer_is_reported(
    installation: Installation, caplog: pytest.LogCaptureFixture
):
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert main(["--wait-s", "3"]) == 1  # no server runs there, so waiting longer is useless
    text = only_error(caplog)
    assert "http://127.0.0.1:9/api cannot be reached" in text
    assert "prefect.apiUrl of the chart" in text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{", "Expecting property name"),
        ('{"variables": {}}', "expected an object with the keys variables and job_configuration"),
        ('{"variables": {}, "job_configuration": {"image": "{{ imag }}"}}', "imag"),
    ],
)
def test_an_invalid_template_is_reported(
    template: str, message: str, installation: Installation, caplog: pytest.LogCaptureFixture
):
    installation.template.write_text(template)
    assert main([]) == 1
    assert message in only_error(caplog)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RETRACE_WORK_POOL", "a pool", "RETRACE_WORK_POOL: found 'a pool'"),
        ("RETRACE_MAX_RUNS", "0", "RETRACE_MAX_RUNS: found '0'"),
        ("RETRACE_POD_START_TIMEOUT_S", "5", "found '5', expected an integer of at least 10"),
        ("RETRACE_FLOW_IMAGE", "", "RETRACE_FLOW_IMAGE is not set"),
        ("RETRACE_CLUSTER", "/nowhere", "RETRACE_CLUSTER: /nowhere cannot be read"),
    ],
)
def test_invalid_settings_are_reported(
    variable: str,
    value: str,
    message: str,
    installation: Installation,
    caplog: pytest.LogCaptureFixture,
):
    installation.set(variable, value)
    assert main([]) == 1
    assert message in only_error(caplog)


def test_the_bucket_of_a_trial_is_created_once(s3_uri: str):
    uri = "s3://retrace-made/runs"
    make_store(uri, PATIENCE_S)
    open_store(uri).create("kept", b"1")
    make_store(uri, PATIENCE_S)
    assert open_store(uri).read("kept") == b"1"
    boto3.client("s3").delete_object(Bucket="retrace-made", Key="runs/kept")
    boto3.client("s3").delete_bucket(Bucket="retrace-made")
