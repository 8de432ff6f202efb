"""The Prefect server that a run starts for itself, with a stand-in for Prefect's program.

tests/integration/run/test_ending.py uses the real program, and ends runs in every possible way.
"""

import sys
from pathlib import Path

import psutil
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from pipeline.flows import server
from pipeline.flows.server import prefect_server
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
    with prefect_server(tmp_path) as reporting:
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
        prefect_server(tmp_path) as reporting,
        reporting,
    ):
        pytest.fail("the server never answered")
    assert "the Prefect server that this run started ended with 1" in str(error.value)
    assert f"The end of {tmp_path}/prefect-server.log:\n  | no such table: flow_run" in str(
        error.value
    )


def test_the_server_ends_after_an_error_of_the_flow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    stand_in(HEALTHY, monkeypatch)
    before = set(started())
    with pytest.raises(KeyboardInterrupt), prefect_server(tmp_path) as reporting, reporting:
        raise KeyboardInterrupt
    assert set(started()) <= before
