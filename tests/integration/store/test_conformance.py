"""The s3:// store does on MinIO what the file store does on a file system."""

import pytest

from pipeline.store import open_store
from pipeline.store.commit import new_attempt
from tests.store_conformance import StoreConformance

pytestmark = pytest.mark.integration


@pytest.fixture
def new_store(s3_uri):
    return lambda: open_store(f"{s3_uri}/{new_attempt()} of #1")


class TestS3Store(StoreConformance):
    pass
