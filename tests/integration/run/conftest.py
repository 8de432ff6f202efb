"""One Prefect server for all runs of a test session, as a team would use it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.prefect_log import check_log
from tests.prefect_server import PrefectServer, start_prefect_server

Query = Callable[[str, dict[str, Any]], Any]


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with start_prefect_server(tmp_path_factory.mktemp("prefect")) as server:
        yield server


@pytest.fixture
def on_prefect_server(prefect_server: PrefectServer, monkeypatch: pytest.MonkeyPatch) -> Query:
    """Point the test's runs at the server, and return a function that queries the server's API."""
    monkeypatch.setenv("PREFECT_API_URL", prefect_server.url)
    return prefect_server.query


@pytest.fixture(autouse=True)
def servers_of_runs_log_no_errors(tmp_path: Path) -> Iterator[None]:
    """Check the logs of the servers that the test's runs started themselves."""
    yield
    for log in tmp_path.rglob("prefect-server.log"):
        check_log(log.read_text())
