"""The Prefect server that a run starts for itself, with a stand-in for Prefect's program.

tests/integration/run/test_ending.py uses the real program, and ends runs in every possible way.
"""

import asyncio
import os
import sys
import urllib.request
from pathlib import Path

import psutil
import pytest
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from pipeline.errors import InputError
from pipeline.flows import server
from pipeline.flows.server import prefect_server, server_problem
from pipeline.launch.base import LaunchError
from tests.patience import eventually

HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/api/health" else 404)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""
BROKEN = "raise SystemExit('no such table: flow_run')"


@pytest.fixture(autouse=True)
def no_server_is_named():
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        yield


def stand_in(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (sys.executable, "-c", program)
    monkeypatch.setattr(server, "_command", lambda port: (*command, str(port)))


def started() -> list[psutil.Process]:
    """Return the guards that this process started and that are still running, with their
    descendants."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if process.status() != psutil.STATUS_ZOMBIE]


def test_flows_report_to_the_server_within_the_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in(HEALTHY, monkeypatch)
    before = set(started())
    with prefect_server(tmp_path, print) as reporting:
        eventually(lambda: len(set(started()) - before) == 2, started)
        assert PREFECT_API_URL.value() is None
        with reporting:
            assert PREFECT_API_URL.value().startswith("http://127.0.0.1:")
        assert PREFECT_API_URL.value() is None
    assert set(started()) <= before


def test_the_error_of_a_server_that_does_not_start_quotes_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in(BROKEN, monkeypatch)
    with (
        pytest.raises(LaunchError) as error,
        prefect_server(tmp_path, print) as reporting,
        reporting,
    ):
        pytest.fail("the server never answered")
    assert "the Prefect server that this run started ended with 1" in str(error.value)
    assert f"The end of {tmp_path}/prefect-server.log:\n  | no such table: flow_run" in str(
        error.value
    )


PROXIES = [
    {"http_proxy": "http://127.0.0.1:9"},
    {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "127.0.0.1:9", "NO_PROXY": "example.org"},
    {"all_proxy": "socks5://127.0.0.1:9"},
    {"ALL_PROXY": "socks5h://127.0.0.1:9", "no_proxy": "[::1],10.0.0.0/8"},
    {"all_proxy": "socks://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "no_proxy": "*"},
]


@pytest.fixture(params=PROXIES, ids=str)
def proxies(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    for name in {*os.environ}:
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    for name, value in request.param.items():
        monkeypatch.setenv(name, value)
    return {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}


async def ask() -> Exception | None:
    async with get_client() as client:
        return await client.api_healthcheck()


def test_the_runs_own_server_is_not_asked_through_a_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxies: dict[str, str]
):
    """Neither by HTTP nor by websockets. Afterwards, the environment is as before."""
    stand_in(HEALTHY, monkeypatch)
    with prefect_server(tmp_path, print) as reporting, reporting:
        with get_client(sync_client=True) as client:
            assert client.api_healthcheck() is None
        assert asyncio.run(ask()) is None
        assert urllib.request.proxy_bypass("127.0.0.1:4200")  # what websockets look at
        url = PREFECT_API_URL.value()
        assert {name: os.environ[name] for name in proxies if name.lower() != "no_proxy"} == {
            name: value for name, value in proxies.items() if name.lower() != "no_proxy"
        }
        with temporary_settings({PREFECT_API_URL: url}):
            assert server_problem() is None, "the same applies to a named server"
    now = {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    assert now == proxies


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9/api", "http://retrace.invalid:4200/api", "nonsense"]
)
def test_a_named_server_that_does_not_answer_is_a_problem(tmp_path: Path, url: str):
    with temporary_settings({PREFECT_API_URL: url}):
        problem = server_problem()
        assert problem is not None
        assert problem.startswith(f"PREFECT_API_URL: found {url}, which cannot be reached: ")
        with pytest.raises(InputError), prefect_server(tmp_path, print):
            pytest.fail("the block must not begin")
    assert not (tmp_path / "prefect-server.log").exists()
