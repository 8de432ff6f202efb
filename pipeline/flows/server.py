"""A Prefect server for a run without PREFECT_API_URL.

Prefect itself would start such a server in the terminal's process group. Ctrl-C would then end the
server before the flow could report that it had ended, and if the flow were killed with SIGKILL, the
server would run forever. This module starts the same program in a separate session and under a
guard, just as launchers start workers.
"""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partialmethod
from pathlib import Path
from unittest.mock import patch

import httpx
import prefect
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    get_current_settings,
    temporary_settings,
)

from pipeline.errors import InputError
from pipeline.launch.base import LaunchError
from pipeline.launch.guard import start_guarded
from pipeline.launch.tail import last_lines
from pipeline.loopback import is_loopback

_POLL_S = 0.1
_SHOWN_EVERY_S = 30
_ANSWER_S = 8.0
"""Seconds within which a server that PREFECT_API_URL names must answer."""
_DRAIN_S = 3.0
_STOP_S = 3.0


@contextlib.contextmanager
def prefect_server(
    folder: Path, show: Callable[[str], None]
) -> Iterator[AbstractContextManager[None]]:
    """Start a server for the block, with its log in `folder`, unless PREFECT_API_URL is set.

    The block begins while the server is still starting. The block receives a context manager;
    within that context, flows report to the server. Entering the context waits until the server
    answers, and raises LaunchError if the server does not start. `show` shows how long it takes.

    Raises InputError if the server that PREFECT_API_URL names does not answer.
    """
    named = PREFECT_API_URL.value()
    if named is not None:
        if (problem := server_problem()) is not None:
            raise InputError([problem])
        yield _directly(named)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "prefect-server.log"
    with log.open("wb") as output:
        process = start_guarded(_command(port), output, _environment())
    try:
        yield _reporting_to(f"http://127.0.0.1:{port}/api", process, log, show)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        assert process.stdin is not None
        process.stdin.close()  # the guard kills any process that is still running
        process.wait()


def server_problem() -> str | None:
    """Return why the server that PREFECT_API_URL names cannot be used; None if it answers.

    Also return None if the variable is not set, because a run then starts its own server.
    """
    from prefect.client.orchestration import get_client

    url = PREFECT_API_URL.value()
    if url is None:
        return None
    error: Exception | None
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), _directly(url):
        try:
            client = get_client(sync_client=True, httpx_settings={"timeout": _ANSWER_S})
            error = client.api_healthcheck()
        except (ImportError, ValueError) as unusable:  # the client cannot use the proxy
            error = unusable
    if error is None:
        return None
    return (
        f"PREFECT_API_URL: found {url}, which cannot be reached: {str(error) or repr(error)}; "
        "start that server, or unset the variable to use an embedded one"
    )


def _command(port: int) -> tuple[str, ...]:
    folder = str(Path(prefect.__file__).parent.parent)
    return (
        *(sys.executable, "-m", "uvicorn", "--app-dir", folder),
        *("--factory", "prefect.server.api.server:create_app"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--log-level", "error", "--lifespan", "on"),
    )


def _environment() -> dict[str, str]:
    return {
        # The same settings as for Prefect's own ephemeral server: no UI, fewer services.
        "PREFECT_UI_ENABLED": "0",
        "PREFECT__SERVER_EPHEMERAL": "1",
        "PREFECT__SERVER_FINAL": "1",
        **get_current_settings().to_environment_variables(exclude_unset=True),
    }


@contextlib.contextmanager
def _directly(url: str) -> Iterator[None]:
    """Have Prefect's clients ignore all proxies if `url` names a server on this machine.

    Prefect has no setting for this. Its HTTP clients first prepare each proxy that the environment
    names, and fail for SOCKS proxies, even if NO_PROXY exempts the server. Its websockets, in
    contrast, look at NO_PROXY first.
    """
    if not is_loopback(url):
        yield
        return
    exempt = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if exempt != "*":
        exempt = ",".join(filter(None, [exempt, "127.0.0.1", "localhost", "::1"]))
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, no_proxy=exempt, NO_PROXY=exempt))
        for client in (PrefectHttpxAsyncClient, PrefectHttpxSyncClient):
            direct = partialmethod(client.__init__, trust_env=False)
            stack.enter_context(patch.object(client, "__init__", direct))
        yield


@contextlib.contextmanager
def _reporting_to(
    url: str, process: subprocess.Popen[bytes], log: Path, show: Callable[[str], None]
) -> Iterator[None]:
    _await_health(url, process, log, show)
    with _directly(url), temporary_settings({PREFECT_API_URL: url}):
        try:
            yield
        finally:
            _send_what_waits()


def _await_health(
    url: str, process: subprocess.Popen[bytes], log: Path, show: Callable[[str], None]
) -> None:
    limit_s = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
    began_s, shown_s = time.monotonic(), 0
    while not _is_healthy(url):
        code, waited_s = process.poll(), time.monotonic() - began_s
        if code is None and waited_s < limit_s:
            if waited_s >= shown_s + _SHOWN_EVERY_S:
                shown_s = int(waited_s)
                show(f"starting Prefect's server, {shown_s} s so far; its log: {log}")
            time.sleep(_POLL_S)
            continue
        found = f"ended with {code}"
        if code is None:
            found = (
                f"did not answer within {limit_s} s "
                "(PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS)"
            )
        raise LaunchError(
            f"the Prefect server that this run started {found}; start the run again, or set "
            "PREFECT_API_URL to a running server. "
            f"The end of {log}:\n{last_lines(log.read_text(errors='replace'))}"
        )


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _send_what_waits() -> None:
    """Send the last events and log lines of Prefect's threads while the server still runs.

    Prefect itself would send them only when the process exits, and the server has ended by then.
    """
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for service in (EventsWorker, APILogWorker):
        service.drain_all(timeout=_DRAIN_S)
