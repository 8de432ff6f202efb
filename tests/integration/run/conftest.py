"""One Prefect server for the runs of a test session, as a team would have one."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

Query = Callable[[str, dict[str, Any]], Any]


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """API URL of a Prefect server with a database of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tmp_path_factory.mktemp("prefect")
    server = subprocess.Popen(
        [sys.executable, "-m", "prefect", "server", "start", "--port", str(port)],
        env={
            **os.environ,
            "PREFECT_HOME": str(folder),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
        },
        stdout=(folder / "server.log").open("wb"),
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{port}/api"
    try:
        deadline = time.monotonic() + 180
        while not _is_ready(url):
            assert server.poll() is None, (folder / "server.log").read_text()
            assert time.monotonic() < deadline, (folder / "server.log").read_text()
            time.sleep(0.3)
        yield url
    finally:
        server.terminate()
        server.wait()


@pytest.fixture
def on_prefect_server(prefect_server: str, monkeypatch: pytest.MonkeyPatch) -> Query:
    """The test's runs use the server; the result asks the server's API."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_server)

    def query(path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            f"{prefect_server}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    return query


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, TimeoutError):
        return False
