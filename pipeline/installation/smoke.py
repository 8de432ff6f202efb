"""Check that an installation's store, Prefect server and deployment work. `helm test` runs it.

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
    """A check failed; the message gives the fix."""


def main() -> int:
    """Run every check, even after a failed one, and return the exit code."""
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
    """Check that an object can be created once, read and deleted; return a summary."""
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
            f"store {shown_uri(uri)}: found bytes that differ from those written; check any "
            "proxy or cache in front of the store"
        )
    return f"store {shown_uri(uri)}: put, get, delete, conditional put"


def check_prefect() -> str:
    """Check that Prefect's server is healthy and accepts the password; return a summary."""
    with prefect_api() as client:
        client.request("GET", "/health")
        found = client.request("GET", "/admin/version").json()
        return f"Prefect {found} at {client.api_url}"


def check_deployment() -> str:
    """Check that the deployment is registered; return a summary with the work pool's status."""
    pool = work_pool_name()
    with prefect_api() as client:
        try:
            deployment = client.read_deployment_by_name(f"{_FLOW}/{pool}")
        except ObjectNotFound as error:
            raise SmokeError(
                f"the deployment {_FLOW}/{pool} is not registered; check the log of the worker "
                "pod's init container `register`"
            ) from error
        status = client.read_work_pool(pool).status
        return f"deployment {_FLOW}/{pool} {deployment.version}, work pool {status}"


if __name__ == "__main__":
    log_to_stderr()
    raise SystemExit(main())
