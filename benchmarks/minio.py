"""A MinIO server with a temporary folder, for s3:// stores."""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import boto3
from botocore.config import Config


@dataclass(frozen=True)
class Minio:
    """A running server with one bucket."""

    uri: str
    """URI of the bucket."""
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU time that the server has used, in seconds."""
        with open(f"/proc/{self.pid}/stat") as line:
            # Fields 14 and 15 are utime and stime; the name in parentheses may contain spaces.
            ticks = line.read().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def own_minio(address: str = "127.0.0.1") -> Iterator[Minio]:
    """Start `minio` (on PATH) at an address, and point the S3 environment variables at it."""
    if shutil.which("minio") is None:
        raise SystemExit("no `minio` on PATH: install it, or name a server with --uri")
    with socket.socket() as free:
        free.bind((address, 0))
        url = f"http://{address}:{free.getsockname()[1]}"
    keys = {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}
    before = dict(os.environ)
    os.environ.update(keys, AWS_ENDPOINT_URL_S3=url, AWS_REGION="us-east-1")
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            ["minio", "server", "--quiet", "--address", url.removeprefix("http://"), folder],
            env={
                **os.environ,
                "MINIO_ROOT_USER": keys["AWS_ACCESS_KEY_ID"],
                "MINIO_ROOT_PASSWORD": keys["AWS_SECRET_ACCESS_KEY"],
            },
        )
        try:
            # The default session would keep the credentials of an earlier server. The retries wait
            # for the start: /minio/health/ready answers 200 before S3 requests are served.
            patient = Config(retries={"mode": "standard", "total_max_attempts": 10})
            boto3.Session().client("s3", config=patient).create_bucket(Bucket="benchmark")
            yield Minio("s3://benchmark", server.pid)
        finally:
            server.kill()
            server.wait()
            os.environ.clear()
            os.environ.update(before)


@contextlib.contextmanager
def places(uris: list[str] | None) -> Iterator[list[str]]:
    """Yield the given stores or, if there are none, a folder and (if it is installed) MinIO."""
    if uris:
        yield uris
        return
    with tempfile.TemporaryDirectory(prefix="retrace-bench-") as folder:
        if shutil.which("minio") is None:
            print("no minio on PATH: measuring files only")
            yield [folder]
            return
        with own_minio() as server:
            yield [folder, f"{server.uri}/benchmark"]
