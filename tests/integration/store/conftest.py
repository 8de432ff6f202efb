"""Fixtures for tests with a real S3 server."""

from tests.minio import minio, s3_uri

__all__ = ["minio", "s3_uri"]
