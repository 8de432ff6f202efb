"""Checks that an installation works: the store, Prefect, the deployment. `helm test` runs it.

python -m pipeline.installation.smoke
"""

import logging
import secrets
from collections.abc import Callable

from prefect.exceptions import ObjectNotFound

from pipeline.errors import InputError
from pipeline.installation.programs import (
    PrefectApiError,
    log_to_stderr,
    prefect_api,
    work_pool_name,
)
from pipeline.launch.kubernetes.cluster import read_cluster
from pipeline.store import StoreError, open_store, shown_uri

log = logging.getLogger("pipeline.installation.smoke")

_FLOW = "retrace"


class SmokeError(Exception):
    """A check failed; the message names the fix."""


def main() -> int:
    """Make every check, even if another one failed, and return the exit code."""
    checks: list[Callable[[], str]] = [check_store, check_prefect, check_deployment]
    failed = 0
    for check in checks:
        try:
            log.info("ok      %s", check())
        except (InputError, StoreError, PrefectApiError, SmokeError) as error:
            failed += 1
            log.error("FAILED  %s", error)
    return 1 if failed else 0


def check_store() -> str:
    """An object can be created once, read and deleted."""
    uri = read_cluster().store_uri
    store = open_store(uri)
    store.probe()
    key, data = f"smoke.{secrets.token_hex(4)}", secrets.token_bytes(1024)
    store.create(key, data)
    try:
        found = store.read(key)
    finally:
        store.delete(key)
    if found != data:
        raise SmokeError(
            f"store {shown_uri(uri)}: read back other bytes than were written; look for a proxy or "
            "a cache in front of the store"
        )
    return f"store {shown_uri(uri)}: put, get, delete, conditional put"


def check_prefect() -> str:
    """Prefect's server is healthy and takes the password."""
    with prefect_api() as client:
        client.request("GET", "/health")
        found = client.request("GET", "/admin/version").json()
        return f"Prefect {found} at {client.api_url}"


def check_deployment() -> str:
    """The deployment is registered; the line shows whether a worker of its pool is alive."""
    pool = work_pool_name()
    with prefect_api() as client:
        try:
            deployment = client.read_deployment_by_name(f"{_FLOW}/{pool}")
        except ObjectNotFound as error:
            raise SmokeError(
                f"the deployment {_FLOW}/{pool} is not registered: look at the log of the worker's "
                "init container `register`"
            ) from error
        status = client.read_work_pool(pool).status
        return f"deployment {_FLOW}/{pool} {deployment.version}, work pool {status}"


if __name__ == "__main__":
    log_to_stderr()
    raise SystemExit(main())
