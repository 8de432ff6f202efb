"""A Prefect server that requires a password, and the environment that the chart gives to pods.

In the tests, the programs use longer timeouts, because their own timeouts suit pods but are too
short for a server on a busy machine.
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
    """Prepare an installation in namespace `first` that is not yet registered with Prefect."""
    made = Installation(tmp_path, monkeypatch)
    made.set("PREFECT_API_URL", server.url)
    made.set("PREFECT_API_AUTH_STRING", AUTH)
    made.write()
    monkeypatch.setattr(programs, "_TIMEOUT_S", PATIENCE_S)
    monkeypatch.setattr(programs, "_RETRIES", RETRIES)
    # This process has already read its environment, so Prefect's settings are changed here.
    settings = {
        PREFECT_API_URL: server.url,
        PREFECT_API_AUTH_STRING: AUTH,
        PREFECT_API_REQUEST_TIMEOUT: PATIENCE_S,
        PREFECT_CLIENT_MAX_RETRIES: RETRIES,
    }
    with temporary_settings(settings):
        yield made
