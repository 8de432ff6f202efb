"""What the programs of an installation share: their log, their work pool, Prefect's API.

register    tells Prefect about the installation
janitor     deletes Jobs that nobody needs
smoke       checks that it works
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

from pipeline.config.errors import InputError

_TIMEOUT_S = 20.0
_RETRIES = 2
"""While the server is busy, 2 and 4 s later: SQLite may be locked for so long."""
_REFUSED = (401, 403)
_LABEL = re.compile(r"(?=.{1,63}$)[A-Za-z0-9]+([._-][A-Za-z0-9]+)*")
"""Of the names that are labels, those that Prefect's worker takes as they are: not a--b."""


class PrefectApiError(Exception):
    """The Prefect API cannot be reached, or refuses; the text says which, and the fix."""


def log_to_stderr() -> None:
    """Lines with time and level; in place of what importing Prefect has set up."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it tells of every request


def work_pool_name() -> str:
    """The installation's work pool. The deployment has the same name: retrace/<work pool>.

    So two installations may use one Prefect server. Raises InputError.
    """
    name = os.environ.get("RETRACE_WORK_POOL", "")
    if not _LABEL.fullmatch(name):
        raise InputError(
            [
                f"RETRACE_WORK_POOL: found {name!r}, expected at most 63 letters, digits, '-', '_' "
                "and '.', for it becomes a label of flow Jobs; correct worker.workPool of the chart"
            ]
        )
    return name


@contextlib.contextmanager
def prefect_api() -> Iterator[SyncPrefectClient]:
    """A client of the API that PREFECT_API_URL names, as also Prefect's own functions make them.

    A request ends in bounded time, and the caller decides what a failure means.
    Raises PrefectApiError for every failed request of the block.
    """
    url = PREFECT_API_URL.value()
    if url is None:  # Prefect would start a server of its own
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
            f"Prefect at {url} cannot be reached: {type(error).__name__}: {error}; look whether "
            "its server runs, and whether the address is right (prefect.apiUrl of the chart)"
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
