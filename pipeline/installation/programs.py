"""Shared parts of an installation's programs: the log, the work pool and Prefect's API.

register    registers the installation with Prefect
janitor     deletes Jobs that no longer belong to a run
smoke       checks that the installation works
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from pipeline.errors import InputError

_TIMEOUT_S = 20.0
_RETRIES = 2
"""Number of retries (after 2 and 4 s) if the server is busy. SQLite may be locked for that long."""
_REFUSED = (401, 403)
_LABEL = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]+([._-][A-Za-z0-9]+)*")
"""Matches valid labels that Prefect's worker does not change. (It would change a--b.)"""


class PrefectApiError(Exception):
    """Prefect's API did not answer or refused a request; the message gives the reason and a fix."""


def log_to_stderr() -> None:
    """Log to stderr with time and level, and remove the handlers that importing Prefect set up."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # httpx logs every request


def work_pool_name() -> str:
    """Return the name of the installation's work pool; its deployment is named retrace/<work pool>.

    Two installations can share a Prefect server if their work pools have different names. Raises
    InputError.
    """
    name = os.environ.get("RETRACE_WORK_POOL", "")
    if not _LABEL.fullmatch(name):
        raise InputError(
            [
                f"RETRACE_WORK_POOL: found {name!r}, expected at most 63 letters and digits, with "
                "single '-', '_' or '.' between them, because the name becomes a label of flow "
                "Jobs; correct worker.workPool of the chart"
            ]
        )
    return name


@contextlib.contextmanager
def prefect_api() -> Iterator[SyncPrefectClient]:
    """Yield a client for the API at PREFECT_API_URL; its requests have time limits.

    Within the block, Prefect's own functions use the same limits, and every failed request raises
    PrefectApiError.
    """
    url = PREFECT_API_URL.value()
    if url is None:  # Prefect would start its own server
        raise PrefectApiError(
            "PREFECT_API_URL is not set; run this program in a pod of the Helm chart, which sets it"
        )
    bounds = {PREFECT_API_REQUEST_TIMEOUT: _TIMEOUT_S, PREFECT_CLIENT_MAX_RETRIES: _RETRIES}
    try:
        with temporary_settings(updates=bounds), get_client(sync_client=True) as client:
            yield client
    except httpx.HTTPStatusError as error:
        raise PrefectApiError(_refusal(url, error.response)) from error
    except httpx.HTTPError as error:
        raise PrefectApiError(
            f"Prefect at {url} cannot be reached: {type(error).__name__}: {error}; check that "
            "its server runs and that the URL is correct (prefect.apiUrl of the chart)"
        ) from error


def _refusal(url: str, response: httpx.Response) -> str:
    request = f"{response.request.method} {response.request.url.path}"
    if response.status_code in _REFUSED:
        return (
            f"Prefect at {url} refuses {request} ({response.status_code}): "
            "PREFECT_API_AUTH_STRING differs from the server's PREFECT_SERVER_API_AUTH_STRING; put "
            "the server's user:password into the Secret that prefect.auth of the chart names"
        )
    return f"Prefect at {url} answers {request} with {response.status_code}: {response.text}"
