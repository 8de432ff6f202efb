"""Registers an installation with Prefect: work pool, deployment, automations. Makes the bucket of a
trial.

    python -m pipeline.installation.register --wait-s 300

It runs before the worker and may run again at any time: it updates what exists.
"""

import argparse
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.deployments.runner import DeploymentApplyError, RunnerDeployment
from prefect.exceptions import ObjectNotFound
from prefect.flows import Flow
from prefect.types.entrypoint import EntrypointType

from pipeline import __version__
from pipeline.errors import InputError
from pipeline.flows.cluster import retrace
from pipeline.installation.automations import register_automations
from pipeline.installation.programs import (
    PrefectApiError,
    log_to_stderr,
    prefect_api,
    work_pool_name,
)
from pipeline.launch.kubernetes.cluster import Cluster, read_cluster
from pipeline.store import StoreError
from pipeline.store.schemes import make_container

log = logging.getLogger("pipeline.installation.register")

_LOOK_EVERY_S = 2.0
_DESCRIPTION = """GRPO on a mixture-of-experts model with routing replay, on this cluster.

The form's fields are described below. A run that failed goes on when it is started again with the
same name."""


def main(arguments: list[str] | None = None) -> int:
    """Register, and return the exit code."""
    parser = argparse.ArgumentParser(prog="pipeline.installation.register", description=__doc__)
    parser.add_argument("--wait-s", type=float, default=300, help="for Prefect's API and the store")
    parsed = parser.parse_args(arguments)
    try:
        register(retrace, parsed.wait_s)
    except (InputError, PrefectApiError, StoreError) as error:
        log.error("%s", error)
        return 1
    return 0


def register(flow: Flow[..., Any], wait_s: float) -> None:
    """Register a flow with the settings in the environment.

    Raises InputError, PrefectApiError, StoreError.
    """
    cluster = read_cluster()
    pool = work_pool_name()
    template = read_template(Path(_variable("RETRACE_BASE_JOB_TEMPLATE")))
    runs = _number("RETRACE_MAX_RUNS", 1)
    start_timeout_s = _number("RETRACE_POD_START_TIMEOUT_S", 10)  # the shortest that Prefect takes
    image = _variable("RETRACE_FLOW_IMAGE")
    if os.environ.get("RETRACE_CREATE_BUCKET") == "true":
        make_store(cluster.store_uri, wait_s)
    await_api(wait_s)
    with prefect_api() as client:
        set_work_pool(client, cluster, pool, template, runs)
        deployment = deploy(client, flow, pool, image)
        register_automations(client, deployment, f"{flow.name}/{pool}", start_timeout_s)
    log.info("registered %s/%s with image %s", flow.name, pool, image)


def read_template(path: Path) -> dict[str, Any]:
    """The base job template, from which Prefect's worker makes flow Jobs. Raises InputError."""
    fix = "it is rendered by the Helm chart: upgrade chart and images together"
    try:
        template = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError([f"RETRACE_BASE_JOB_TEMPLATE: {path}: {error}; {fix}"]) from error
    if not isinstance(template, dict) or set(template) != {"variables", "job_configuration"}:
        raise InputError(
            [
                f"RETRACE_BASE_JOB_TEMPLATE: {path}: expected an object of variables and "
                f"job_configuration; {fix}"
            ]
        )
    return template


def await_api(wait_s: float) -> None:
    """Return once Prefect's API is healthy. Raises PrefectApiError after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    logged = False
    while True:
        try:
            with prefect_api() as client:
                client.request("GET", "/health")
            return
        except PrefectApiError as error:
            if time.monotonic() + _LOOK_EVERY_S > deadline_s:
                raise PrefectApiError(f"{error}; waited {wait_s:.0f} s") from error
            if not logged:
                log.info("waiting for Prefect, at most %.0f s: %s", wait_s, error)
                logged = True
        time.sleep(_LOOK_EVERY_S)


def set_work_pool(
    client: SyncPrefectClient, cluster: Cluster, name: str, template: dict[str, Any], runs: int
) -> None:
    """Create the work pool, or update it.

    The pool limits how many runs are at work. The deployment could too, but then each flow run
    holds a lease; a server that restarts forgets leases, and Prefect ends those runs.
    Raises InputError for a pool that is not this installation's; PrefectApiError.
    """
    ours = f"Runs of the Retrace installation {cluster.instance} in namespace {cluster.namespace}."
    settings: dict[str, Any] = {
        "description": ours,
        "base_job_template": template,
        "concurrency_limit": runs,
    }
    try:
        found = client.read_work_pool(name)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=name, type="kubernetes", **settings))
        log.info("created work pool %s, %d runs at a time", name, runs)
        return
    if (found.type, found.description) != ("kubernetes", ours):
        raise InputError(
            [
                f"worker.workPool: the work pool {name!r} exists in Prefect, of type {found.type} "
                f"and described as {found.description!r}, expected {ours!r}; choose another name, "
                f"or delete that pool: prefect work-pool delete {name}"
            ]
        )
    client.update_work_pool(name, WorkPoolUpdate(**settings))
    log.info("updated work pool %s, %d runs at a time", name, runs)


def deploy(client: SyncPrefectClient, flow: Flow[..., Any], pool: str, image: str) -> UUID:
    """Create or update the deployment <flow>/<pool>; returns its id. Raises PrefectApiError."""
    deployment = RunnerDeployment.from_flow(
        flow,
        pool,
        work_pool_name=pool,
        job_variables={"image": image},
        description=_DESCRIPTION,
        tags=["retrace"],
        version=__version__,
        enforce_parameter_schema=True,
        # The module is in the image: there is no code to fetch and no folder to run in.
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    try:
        return cast(UUID, deployment.apply())
    except DeploymentApplyError as error:
        raise PrefectApiError(
            f"Prefect refuses the deployment {flow.name}/{pool}: {error}; correct the values of "
            "the chart that it names"
        ) from error


def make_store(store_uri: str, wait_s: float) -> None:
    """Make the bucket of a trial's store, if it is missing. Raises StoreError."""
    if make_container(store_uri, wait_s):
        log.info("made the bucket of %s", store_uri)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise InputError([f"{name} is not set: this program runs in a pod of the Helm chart"])
    return value


def _number(name: str, least: int) -> int:
    text = _variable(name)
    if not text.isdecimal() or int(text) < least:
        raise InputError([f"{name}: found {text!r}, expected a whole number of at least {least}"])
    return int(text)


if __name__ == "__main__":
    log_to_stderr()
    raise SystemExit(main())
