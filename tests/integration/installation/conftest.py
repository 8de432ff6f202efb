"""A Prefect server that asks for a password, and the environment that the chart gives to pods.

All patience is that of tests: the programs' own, which is right for pods, would make them fail
where a server is slow because the machine is busy.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)

from pipeline.installation import programs
from tests.integration.installation.installation import RETRIES, Installation
from tests.patience import PATIENCE_S
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
    monkeypatch.setattr(programs, "_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(programs, "_RETRIES", RETRIES)
    # What this process has read from its environment already.
    settings = {
        PREFECT_API_URL: server.url,
        PREFECT_API_AUTH_STRING: AUTH,
        PREFECT_API_REQUEST_TIMEOUT: PATIENCE_S,
        PREFECT_CLIENT_MAX_RETRIES: RETRIES,
    }
    with temporary_settings(settings):
        yield made
