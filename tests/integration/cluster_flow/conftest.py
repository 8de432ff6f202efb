"""A Prefect server that asks for a password, and the environment that the chart gives to pods."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from tests.integration.cluster_flow.installation import Installation
from tests.prefect_server import PrefectServer, start_prefect_server

AUTH = "retrace:a password of the tests"


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    with start_prefect_server(tmp_path_factory.mktemp("prefect"), AUTH) as server:
        yield server


@pytest.fixture
def installation(
    server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Installation]:
    """An installation in namespace `first`, of which Prefect knows nothing yet."""
    made = Installation(tmp_path, monkeypatch)
    made.set("PREFECT_API_URL", server.url)
    made.set("PREFECT_API_AUTH_STRING", AUTH)
    made.write()
    # What this process has read from its environment already.
    with temporary_settings({PREFECT_API_URL: server.url, PREFECT_API_AUTH_STRING: AUTH}):
        yield made
