"""What the programs of an installation share: their log, their work pool, Prefect's API.

register    registers the installation with Prefect
janitor     deletes Jobs that nobody needs
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
"""2 and 4 s later, while the server is busy: SQLite may be locked for that long."""
_REFUSED = (401, 403)
_LABEL = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]+([._-][A-Za-z0-9]+)*")
"""Names that are labels and that Prefect's worker takes unchanged: not a--b."""


class PrefectApiError(Exception):
    """The Prefect API cannot be reached, or refuses; the message names the cause and the fix."""


def log_to_stderr() -> None:
    """Log lines with time and level, in place of what importing Prefect sets up."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every request


def work_pool_name() -> str:
    """The installation's work pool. The deployment has the same name: retrace/<work pool>.

    Thus two installations can use one Prefect server. Raises InputError.
    """
    name = os.environ.get("RETRACE_WORK_POOL", "")
    if not _LABEL.fullmatch(name):
        raise InputError(
            [
                f"RETRACE_WORK_POOL: found {name!r}, expected at most 63 letters, digits, '-', '_' "
                "and '.', as it becomes a label of flow Jobs; correct worker.workPool of the chart"
            ]
        )
    return name


@contextlib.contextmanager
def prefect_api() -> Iterator[SyncPrefectClient]:
    """A client of the API that PREFECT_API_URL names; Prefect's own functions in the block use the
    same bounds.

    A request ends in bounded time, and the caller decides what a failure means.
    Raises PrefectApiError for every failed request of the block.
    """
    url = PREFECT_API_URL.value()
    if url is None:  # Prefect would start its own server
        raise PrefectApiError(
            "PREFECT_API_URL is not set: this program runs in a pod of the Helm chart"
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
            "its server runs, and that the address is right (prefect.apiUrl of the chart)"
        ) from error


def _refusal(url: str, response: httpx.Response) -> str:
    request = f"{response.request.method} {response.request.url.path}"
    if response.status_code in _REFUSED:
        return (
            f"Prefect at {url} refuses {request} ({response.status_code}): "
            "PREFECT_API_AUTH_STRING is not the server's PREFECT_SERVER_API_AUTH_STRING; put the "
            "server's user:password into the Secret that prefect.auth of the chart names"
        )
    return f"Prefect at {url} answers {request} with {response.status_code}: {response.text}"
