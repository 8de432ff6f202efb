"""Run the same faults on files and on a real S3 server."""

import pytest

from tests.minio import minio, s3_uri

__all__ = ["minio", "place", "s3_uri"]


@pytest.fixture(params=["file", "s3"])
def place(request: pytest.FixtureRequest, tmp_path) -> str:
    """Return the URI of an empty store that other processes can also open."""
    if request.param == "s3":
        return request.getfixturevalue("s3_uri")
    return (tmp_path / "store").as_uri()
