"""A real MinIO server for tests, which can be stopped, paused and restarted with different keys.

Import the fixtures `minio` and `s3_uri` into a conftest or a test module. `minio` is one server for
the entire session. `s3_uri` is the URI of an empty store on this server; the fixture sets the
environment of this process so that the store can be reached. Tests that stop or change a server
start a separate one with `start_minio`.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionError, HTTPClientError

from tests.patience import PATIENCE_S

BUCKET = "retrace-tests"


@dataclass
class Minio:
    """A server with its own port and folder."""

    folder: Path
    port: int
    user: str = "first"
    password: str = "a password of the tests"
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, or restart it after a stop, and wait until it serves requests."""
        assert self._process is None, "the server already runs; a second process would never end"
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                ["minio", "server", "--quiet", "--address", f"127.0.0.1:{self.port}", "data"],
                cwd=self.folder,
                env={
                    **os.environ,
                    "MINIO_ROOT_USER": self.user,
                    "MINIO_ROOT_PASSWORD": self.password,
                    "MINIO_BROWSER": "off",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        # MinIO reports on /minio/health/ready that it is ready before it can serve S3 requests.
        client = self.client()
        deadline = time.monotonic() + PATIENCE_S
        while not _serves(client):
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            time.sleep(0.05)

    def stop(self) -> None:
        """Kill the server with SIGKILL. Its connections break, but acknowledged objects remain."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, user: str) -> None:
        """Restart the server with a different access key, so that the old one is revoked."""
        self.stop()
        self.user = user
        self.start()

    def pause(self) -> None:
        """Pause the server: it still accepts connections, but does not answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def environment(self) -> dict[str, str]:
        """Return variables that point clients to the server, overriding the machine's S3 setup."""
        return {
            "AWS_ENDPOINT_URL_S3": self.url,
            "AWS_ACCESS_KEY_ID": self.user,
            "AWS_SECRET_ACCESS_KEY": self.password,
            "AWS_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """Return a boto3 client that does not repeat requests."""
        # The default session may not be shared with the threads in which tests restart servers.
        return boto3.Session().client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=self.user,
            aws_secret_access_key=self.password,
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 1}),
        )


def _serves(client: Any) -> bool:
    """Whether the server serves requests yet. Errors that do not come from its start are raised."""
    try:
        client.list_buckets()
    except (ConnectionError, HTTPClientError):
        return False
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != HTTPStatus.SERVICE_UNAVAILABLE:
            raise
        return False
    return True


@contextlib.contextmanager
def start_minio(folder: Path) -> Iterator[Minio]:
    """Yield a running server with the bucket BUCKET. Skip the test if `minio` is missing."""
    if shutil.which("minio") is None:
        pytest.skip("needs the program `minio` on PATH (https://min.io/download)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Minio(folder, port)
    server.start()
    try:
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def minio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Minio]:
    """The session's server; a test that stops it must start it again."""
    with start_minio(tmp_path_factory.mktemp("minio")) as server:
        yield server


@pytest.fixture
def s3_uri(minio: Minio, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of an empty store on the server, to which this process's environment points."""
    use(minio, monkeypatch)
    return new_place()


def use(server: Minio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the environment so that this process and its children reach only this S3 server."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


def new_place() -> str:
    """Return the URI of an empty store."""
    return f"s3://{BUCKET}/{secrets.token_hex(4)}"
