"""Requests to one S3 bucket, with retries, new credentials if needed, and complete messages.

Settings come from boto3's own sources (environment, profile, web identity), so a worker needs only
its environment. pipeline.store.settings describes the effect of the `store.*` settings. botocore's
own retries are disabled, because this module decides how long to wait and logs each retry.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from pipeline.loopback import is_loopback
from pipeline.store.base import (
    ObjectExistsError,
    ObjectMissingError,
    RefusedError,
    StoreError,
)
from pipeline.store.operations import operation
from pipeline.store.s3_errors import FAILURES, Kind, Verdict, judge
from pipeline.store.settings import PATH_STYLE

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client as BotoClient

log = logging.getLogger(__name__)
# At level INFO, every new session logs where it found its credentials.
logging.getLogger("botocore").setLevel(logging.WARNING)

PATIENCE_S = 120.0
"""How many seconds requests are retried: long enough for a server to restart, for example."""
CONNECTIONS = 16
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0
_GREETING_S = 5.0
_silent: dict[str, tuple[float, str]] = {}
"""Servers that did not answer a greeting: until when requests to each fail at once (by
time.monotonic()), and the error."""
_T = TypeVar("_T")


class RangeBeyondError(StoreError):
    """The first requested byte is beyond the object's end."""


class UploadGoneError(StoreError):
    """The multipart upload was completed, aborted or removed."""


class S3Client:
    """A thread-safe client for one bucket. The first request creates boto3's client.

    `try_s` limits the wait for a connection, and for each part of a response; None selects limits
    for large objects.
    """

    def __init__(
        self,
        bucket: str,
        uri: str,
        patience_s: float = PATIENCE_S,
        try_s: float | None = None,
    ) -> None:
        self.bucket = bucket
        self._try_s = try_s
        self._uri = uri
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._boto: BotoClient | None = None

    def call(
        self,
        what: str,
        name: str,
        request: Callable[["BotoClient"], _T],
        stop: threading.Event | None = None,
    ) -> _T:
        """Send a request, and repeat it until it succeeds or cannot succeed.

        After a reset, timeout, throttling, 5xx or conflict, the request is repeated until
        `patience_s` seconds after the first failure. If the server refuses the credentials, the
        request is repeated once with new credentials.

        Args:
            what: The operation, such as 'read run.json'; every error message begins with it.
            name: S3's name for the operation.
            request: Sends the request with the boto3 client; may be called several times.
            stop: An event that ends the wait between tries.

        Returns:
            The result of `request`.

        Raises:
            ObjectMissingError: The server returned 404.
            ObjectExistsError: The server returned 412.
            RangeBeyondError: The server returned 416.
            UploadGoneError: The multipart upload no longer exists.
            RefusedError: The server returned 403, or a different error that would recur.
            StoreError: The request did not succeed within `patience_s`.
        """
        tries, refreshed, first_failure = 0, False, 0.0
        while True:
            client = self._client(what)
            until_s, silence = _silent.get(_host(client), (0.0, ""))
            if time.monotonic() < until_s:
                raise StoreError(f"{what} in {self._uri}: {silence}")
            try:
                with operation(f"{what} in {self._uri}: {name}"):
                    answer = request(client)
            except FAILURES as error:
                tries += 1
                first_failure = first_failure or time.monotonic()
                verdict = judge(error)
                text = self._describe(what, name, client, verdict)
                if verdict.kind is Kind.CREDENTIALS and not refreshed:
                    refreshed = True
                    log.warning("%s; fetching new credentials", text)
                    self._forget(client)
                    continue
                if verdict.kind is not Kind.RETRY:
                    raise _error(verdict, text) from error
                self._pause(text, tries, first_failure, stop, error)
            else:
                if tries:
                    log.warning(
                        "%s in %s: answered on try %d, %.1f s after the first failure",
                        what,
                        self._uri,
                        tries + 1,
                        time.monotonic() - first_failure,
                    )
                return answer

    def _pause(
        self,
        text: str,
        tries: int,
        first_failure: float,
        stop: threading.Event | None,
        error: Exception,
    ) -> None:
        """Wait before the next try. Raises StoreError if no time is left."""
        left_s = first_failure + self._patience_s - time.monotonic()
        # Jitter prevents many workers from returning to a struggling server at the same moment.
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** (tries - 1)) * random.uniform(0.5, 1)
        if pause_s > left_s:
            raise StoreError(f"{text}; tried {tries} times in {self._patience_s:.0f} s") from error
        log.warning("%s; retrying (try %d), giving up in %.0f s", text, tries + 1, left_s)
        if stop is None:
            time.sleep(pause_s)
        elif stop.wait(pause_s):
            raise StoreError(f"{text}; stopped") from error

    def _client(self, what: str) -> "BotoClient":
        with self._lock:
            if self._boto is None:
                try:
                    self._boto = _make_client(self._try_s)
                except (BotoCoreError, ValueError) as error:
                    # ValueError: the endpoint is not a URL. Neither message contains a secret.
                    raise StoreError(
                        f"{what} in {self._uri}: {type(error).__name__}: {error}; correct the AWS "
                        "settings (environment, profile)"
                    ) from error
            return self._boto

    def _forget(self, client: "BotoClient") -> None:
        """Make the next request create a new client, unless another thread has already done so."""
        with self._lock:
            if self._boto is client:
                self._boto = None

    def _describe(self, what: str, operation: str, client: "BotoClient", verdict: Verdict) -> str:
        if verdict.kind is Kind.MISSING:
            return f"{what} in {self._uri}: no such object (at {_host(client)})"
        if verdict.kind is Kind.EXISTS:
            return f"{what} in {self._uri}: the object already exists (at {_host(client)})"
        return (
            f"{what} in {self._uri}: {operation} in bucket {self.bucket} at {_host(client)}: "
            f"{verdict.text}; {verdict.fix}"
        )


def _error(verdict: Verdict, text: str) -> StoreError:
    kinds: dict[Kind, type[StoreError]] = {
        Kind.MISSING: ObjectMissingError,
        Kind.EXISTS: ObjectExistsError,
        Kind.GONE: UploadGoneError,
        Kind.BEYOND: RangeBeyondError,
    }
    return kinds.get(verdict.kind, RefusedError)(text)


def greet(bucket: str, uri: str) -> None:
    """Make the first contact with a server. If it does not answer, later requests fail at once.

    PATIENCE_S is for servers that restart. A server that does not answer the first request probably
    has the wrong address, and a program that reads several inputs would wait for it each time.
    """
    client = S3Client(bucket, uri, _GREETING_S, _GREETING_S / 2)
    what, host = "reach the server", _host(client._client("reach the server"))
    _silent.pop(host, None)
    try:
        client.call(what, "HeadBucket", lambda s3: s3.head_bucket(Bucket=bucket))
    except (ObjectMissingError, RefusedError):
        return  # it answered, or the settings are wrong; the next request reports the problem
    except StoreError as error:
        _silent[host] = (time.monotonic() + PATIENCE_S, str(error))


def _make_client(try_s: float | None) -> "BotoClient":
    session = boto3.session.Session()
    bundle = os.environ.get("AWS_CA_BUNDLE")
    if bundle and not Path(bundle).exists():
        # botocore would report the missing file only while connecting, as an error to be retried.
        raise ValueError(f"AWS_CA_BUNDLE: found {bundle}, which does not exist")
    styles: dict[str, Literal["path", "virtual"]] = {"true": "path", "false": "virtual"}
    path_style = os.environ.get(PATH_STYLE)
    if path_style is not None and path_style not in styles:
        raise ValueError(f"{PATH_STYLE}: found {path_style!r}, expected true or false")
    config = Config(
        retries={"total_max_attempts": 1},
        max_pool_connections=CONNECTIONS,
        connect_timeout=try_s or _CONNECT_TIMEOUT_S,
        read_timeout=try_s or _READ_TIMEOUT_S,
        s3={"addressing_style": styles[path_style] if path_style else "auto"},
        user_agent_extra="retrace",
    )
    # boto3 reads only AWS_DEFAULT_REGION; all other SDKs read AWS_REGION.
    region = os.environ.get("AWS_REGION") or session.region_name or "us-east-1"
    client = session.client("s3", region_name=region, config=config)
    if not is_loopback(client.meta.endpoint_url):
        return client
    # A server on this machine is never reached through a proxy.
    direct = config.merge(Config(proxies={}))
    return session.client("s3", region_name=region, config=direct)


def _host(client: "BotoClient") -> str:
    """Return the endpoint without the credentials that its URL may contain."""
    parts = urlsplit(client.meta.endpoint_url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
