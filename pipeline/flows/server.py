"""A Prefect server for a run without PREFECT_API_URL.

Prefect itself would start such a server in the terminal's process group. Ctrl-C would then end the
server before the flow could report that it had ended, and if the flow were killed with SIGKILL, the
server would run forever. This module starts the same program in a separate session and under a
guard, just as launchers start workers.
"""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import prefect
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS,
    get_current_settings,
    temporary_settings,
)

from pipeline.errors import InputError
from pipeline.launch.base import LaunchError
from pipeline.launch.guard import start_guarded
from pipeline.launch.tail import last_lines

_POLL_S = 0.1
_DRAIN_S = 3.0
_STOP_S = 3.0


@contextlib.contextmanager
def prefect_server(folder: Path) -> Iterator[AbstractContextManager[None]]:
    """Start a server for the block, with its log in `folder`, unless PREFECT_API_URL is set.

    The block begins while the server is still starting. The block receives a context manager;
    within that context, flows report to the server. Entering the context waits until the server
    answers, and raises LaunchError if the server does not start.

    Raises InputError if the server that PREFECT_API_URL names does not answer.
    """
    named = PREFECT_API_URL.value()
    if named is not None:
        _refuse_unreachable(named)
        yield contextlib.nullcontext()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "prefect-server.log"
    with log.open("wb") as output:
        process = start_guarded(_command(port), output, _environment())
    try:
        yield _reporting_to(f"http://127.0.0.1:{port}/api", process, log)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
        assert process.stdin is not None
        process.stdin.close()  # the guard kills any process that is still running
        process.wait()


def _refuse_unreachable(url: str) -> None:
    from prefect.client.orchestration import get_client

    error = get_client(sync_client=True).api_healthcheck()
    if error is not None:
        raise InputError(
            [
                f"PREFECT_API_URL: found {url}, which cannot be reached: {error}; start that "
                "server, or unset the variable to use an embedded one"
            ]
        ) from error


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
def _reporting_to(url: str, process: subprocess.Popen[bytes], log: Path) -> Iterator[None]:
    _await_health(url, process, log)
    with temporary_settings({PREFECT_API_URL: url}):
        try:
            yield
        finally:
            _send_what_waits()


def _await_health(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    limit_s = PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS.value()
    deadline_s = time.monotonic() + limit_s
    while not _is_healthy(url):
        code = process.poll()
        if code is None and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)
            continue
        found = f"did not answer within {limit_s} s" if code is None else f"ended with {code}"
        raise LaunchError(
            f"the Prefect server that this run started {found}; start the run again, or set "
            "PREFECT_API_URL to a running server. "
            f"The end of {log}:\n{last_lines(log.read_text(errors='replace'))}"
        )


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == httpx.codes.OK
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
