"""The smoke test with a real Prefect server and a real S3 server."""

import logging

import pytest
from prefect import flow

from pipeline.installation import smoke
from pipeline.installation.register import register
from pipeline.store import open_store
from tests.integration.installation.installation import Installation
from tests.minio import minio, s3_uri
from tests.patience import PATIENCE_S

__all__ = ["minio", "s3_uri"]

pytestmark = pytest.mark.integration


@flow(name="retrace")
def stand_in(run_name: str) -> None: ...


@pytest.fixture
def stored(installation: Installation, s3_uri: str) -> Installation:
    """Return an installation whose store is on a real S3 server."""
    installation.store_uri = s3_uri
    installation.write()
    return installation


def test_a_working_installation_passes(stored: Installation, caplog: pytest.LogCaptureFixture):
    register(stand_in, PATIENCE_S)
    with caplog.at_level(logging.INFO):
        assert smoke.main() == 0
    text = caplog.text
    assert f"store {stored.store_uri}: put, get, delete, conditional put" in text
    assert "Prefect 3." in text
    assert f"deployment retrace/{stored.pool} 0." in text
    assert list(open_store(stored.store_uri).list("")) == []


def test_each_failure_is_reported_with_a_fix(
    stored: Installation, caplog: pytest.LogCaptureFixture
):
    stored.set("AWS_SECRET_ACCESS_KEY", "wrong")
    assert smoke.main() == 1
    store, deployment = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "SignatureDoesNotMatch" in store
    assert "pass valid credentials" in store
    assert f"retrace/{stored.pool} is not registered" in deployment
    assert "init container `register`" in deployment
