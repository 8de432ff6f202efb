"""The s3:// store on MinIO passes the same tests as the file store."""

import pytest

from pipeline.store import open_store
from tests.store_conformance import StoreConformance

pytestmark = pytest.mark.integration


@pytest.fixture
def store(s3_uri):
    return open_store(f"{s3_uri}/50% of #1")


class TestS3Store(StoreConformance):
    pass
