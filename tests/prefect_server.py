"""A real Prefect server for tests, which can be killed and restarted on the same database."""

import base64
import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.patience import PATIENCE_S
from tests.prefect_log import check_log

_BUSY = 503
"""The status of responses while SQLite is locked; clients then try again."""


@dataclass
class PrefectServer:
    """A server with its own port and database."""

    folder: Path
    port: int
    auth: str | None = None
    """The user:password that the server requires."""
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of the server's API."""
        return f"http://127.0.0.1:{self.port}/api"

    def start(self) -> None:
        """Start the server, or restart it after a stop, and wait until it is healthy."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "prefect", "server", "start", "--port", str(self.port)],
                env={
                    **os.environ,
                    "PREFECT_HOME": str(self.folder),
                    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
                    "DO_NOT_TRACK": "1",
                    **({"PREFECT_SERVER_API_AUTH_STRING": self.auth} if self.auth else {}),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._is_healthy():
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            assert time.monotonic() < deadline_s, (self.folder / "server.log").read_text()
            time.sleep(0.3)

    def kill(self) -> None:
        """Kill the server, as the loss of its node would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Terminate the server and wait for it to end."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def query(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Send a request, and return the JSON response, or None if the response is empty.

        Args:
            path: The path below /api.
            body: The request's content, which is sent as JSON; None for no content.
            method: The HTTP method. By default, POST with a body, and GET without one.
        """
        request = urllib.request.Request(
            f"{self.url}{path}",
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        if self.auth is not None:
            encoded = base64.b64encode(self.auth.encode()).decode()
            request.add_header("Authorization", f"Basic {encoded}")
        while True:
            try:
                with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                    text = answer.read()
                return json.loads(text) if text else None
            except urllib.error.HTTPError as error:
                if error.code != _BUSY:
                    raise
                time.sleep(0.5)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


@contextlib.contextmanager
def start_prefect_server(folder: Path, auth: str | None = None) -> Iterator[PrefectServer]:
    """Yield a running server, and stop it at the end. Its log must not contain errors."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        server = PrefectServer(folder, free.getsockname()[1], auth)
    try:
        server.start()
        yield server
    finally:
        server.stop()
    check_log((folder / "server.log").read_text())
