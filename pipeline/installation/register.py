"""Register an installation with Prefect: its work pool, deployment and automations.

    python -m pipeline.installation.register --wait-s 300

For a trial installation, this program also creates the store's bucket. The program runs before
Prefect's worker starts. It may run again at any time, because it updates what already exists.
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
_DESCRIPTION = """Train a mixture-of-experts model with GRPO and routing replay on this cluster.

The fields of the form are described below. To continue a failed run, start it again with the same
name."""


def main(arguments: list[str] | None = None) -> int:
    """Register the installation, and return the exit code."""
    parser = argparse.ArgumentParser(prog="pipeline.installation.register", description=__doc__)
    parser.add_argument(
        "--wait-s",
        type=float,
        default=300,
        help="seconds to wait for Prefect's API and for the store",
    )
    parsed = parser.parse_args(arguments)
    try:
        register(retrace, parsed.wait_s)
    except (InputError, PrefectApiError, StoreError) as error:
        log.error("%s", error)
        return 1
    return 0


def register(flow: Flow[..., Any], wait_s: float) -> None:
    """Register a flow, with settings from the environment.

    The waits for Prefect's API and for the store last at most `wait_s` seconds each. Raises
    InputError, PrefectApiError or StoreError.
    """
    cluster = read_cluster()
    pool = work_pool_name()
    template = read_template(Path(_variable("RETRACE_BASE_JOB_TEMPLATE")))
    runs = _number("RETRACE_MAX_RUNS", 1)
    start_timeout_s = _number("RETRACE_POD_START_TIMEOUT_S", 10)  # Prefect's minimum
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
    """Read the template from which Prefect's worker creates flow Jobs. Raises InputError."""
    fix = "the Helm chart renders this file, so upgrade the chart and the images together"
    try:
        template = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError([f"RETRACE_BASE_JOB_TEMPLATE: {path}: {error}; {fix}"]) from error
    if not isinstance(template, dict) or set(template) != {"variables", "job_configuration"}:
        raise InputError(
            [
                f"RETRACE_BASE_JOB_TEMPLATE: {path}: expected an object with the keys variables "
                f"and job_configuration; {fix}"
            ]
        )
    return template


def await_api(wait_s: float) -> None:
    """Wait until Prefect's API is healthy. Raises PrefectApiError after `wait_s` seconds."""
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
    """Create the work pool or update it.

    The pool limits the number of runs in progress. The deployment could limit this number instead,
    but each flow run would then hold a lease. A restarted server forgets leases, and Prefect would
    end the runs that held them.

    Args:
        client: A client of Prefect's API.
        cluster: The installation.
        name: The work pool's name.
        template: The base job template.
        runs: The maximum number of runs in progress.

    Raises:
        InputError: The pool exists and does not belong to this installation.
        PrefectApiError: Prefect's API does not answer, or refuses a request.
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
        log.info("created work pool %s with at most %d runs in progress", name, runs)
        return
    if (found.type, found.description) != ("kubernetes", ours):
        raise InputError(
            [
                f"worker.workPool: found the work pool {name!r} in Prefect with the type "
                f"{found.type} and the description {found.description!r}, expected the type "
                f"kubernetes and the description {ours!r}; choose a different name, or delete that "
                f"pool: prefect work-pool delete {name}"
            ]
        )
    client.update_work_pool(name, WorkPoolUpdate(**settings))
    log.info("updated work pool %s with at most %d runs in progress", name, runs)


def deploy(client: SyncPrefectClient, flow: Flow[..., Any], pool: str, image: str) -> UUID:
    """Create or update the deployment <flow>/<pool>, and return its id.

    Args:
        client: A client of Prefect's API.
        flow: The flow to deploy.
        pool: The work pool's name, which is also the deployment's name.
        image: The image of flow pods.

    Raises:
        PrefectApiError: Prefect refuses the deployment or does not answer.
    """
    deployment = RunnerDeployment.from_flow(
        flow,
        pool,
        work_pool_name=pool,
        job_variables={"image": image},
        description=_DESCRIPTION,
        tags=["retrace"],
        version=__version__,
        enforce_parameter_schema=True,
        # The image contains the module, so Prefect does not fetch code or need a working folder.
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    try:
        return cast(UUID, deployment.apply())
    except DeploymentApplyError as error:
        raise PrefectApiError(
            f"Prefect refuses the deployment {flow.name}/{pool}: {error}; correct the "
            "chart's values that this error names"
        ) from error


def make_store(store_uri: str, wait_s: float) -> None:
    """Create the bucket of a trial installation's store if it does not exist. Raises StoreError."""
    if make_container(store_uri, wait_s):
        log.info("created the bucket of %s", store_uri)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise InputError(
            [f"{name} is not set; run this program in a pod of the Helm chart, which sets it"]
        )
    return value


def _number(name: str, least: int) -> int:
    text = _variable(name)
    if not text.isdecimal() or int(text) < least:
        raise InputError(
            [f"{name}: found {text!r}, expected an integer of at least {least}; correct it"]
        )
    return int(text)


if __name__ == "__main__":
    log_to_stderr()
    raise SystemExit(main())
