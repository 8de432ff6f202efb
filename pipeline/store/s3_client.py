"""boto3's client for one S3 bucket, with retries, new credentials if needed, and complete messages.

Settings come from boto3's own sources (environment, profile, web identity), so a worker needs only
its environment. pipeline.store.settings describes the effect of the `store.*` settings. botocore's
own retries are disabled, because this module decides how long to wait and logs each retry. botocore
asks it after each request (event `needs-retry`), including the requests of a managed transfer.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit

import boto3
from botocore.config import Config
from botocore.credentials import Credentials, ReadOnlyCredentials
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError
from botocore.session import Session

from pipeline.loopback import is_loopback
from pipeline.store.base import ObjectExistsError, ObjectMissingError, RefusedError, StoreError
from pipeline.store.s3_errors import (
    FAILURES,
    CredentialsError,
    RangeBeyondError,
    UploadGoneError,
    judge,
)
from pipeline.store.settings import PATH_STYLE

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client as BotoClient
    from mypy_boto3_s3.type_defs import HeadObjectOutputTypeDef

log = logging.getLogger(__name__)
# At level INFO, every new session logs where it found its credentials.
logging.getLogger("botocore").setLevel(logging.WARNING)

PATIENCE_S = 120.0
"""How many seconds requests are retried: long enough for a server to restart, for example."""
_CONNECTIONS = 16
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_CONNECT_TIMEOUT_S = 10.0
_READ_TIMEOUT_S = 60.0
GREETING_S = 5.0
"""How many seconds the first contact with a server may take."""
_SHORT: dict[type[StoreError], str] = {
    ObjectMissingError: "no such object",
    ObjectExistsError: "the object already exists",
    RangeBeyondError: "the object ends before the range",
}
"""Texts for answers that do not report a failure."""
_silent: dict[str, tuple[float, str]] = {}
"""Servers that did not answer a greeting: until when requests to each fail at once (by
time.monotonic()), and the error."""


class Tries:
    """The tries of one request, which are repeated until `patience_s` after the first failure."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._failures = 0
        self._first_s = 0.0

    def pause_s(self, text: str) -> float | None:
        """Return how many seconds to wait after a failure; None if no time is left."""
        self._failures += 1
        self._first_s = self._first_s or time.monotonic()
        left_s = self._first_s + self._patience_s - time.monotonic()
        longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._failures - 1))
        # Jitter prevents many workers from returning to a struggling server at the same moment.
        pause_s = longest_s * random.uniform(0.5, 1)
        if pause_s > left_s:
            return None
        again = self._failures + 1
        log.warning("%s; retrying (try %d), giving up in %.0f s", text, again, left_s)
        return pause_s

    def answered(self, text: str) -> None:
        """Log the end of the wait, if there were failures."""
        if self._failures:
            lasted_s = time.monotonic() - self._first_s
            tries = self._failures + 1
            log.warning("%s: answered on try %d, %.1f s after the first", text, tries, lasted_s)


class S3Client:
    """Gives access to boto3's client, which the first request creates. It can be used by threads.

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
        self.patience_s = patience_s
        self._try_s = try_s
        self._uri = uri
        self._lock = threading.Lock()
        self._boto: BotoClient | None = None
        self._credentials: _Credentials

    @contextmanager
    def requests(self, what: str) -> Iterator["BotoClient"]:
        """Yield boto3's client, and raise its errors as store errors.

        After a reset, timeout, throttling, 5xx or conflict, the client repeats a request until
        `patience_s` seconds after the first failure. If the server refuses the credentials, the
        client repeats the request once with new credentials.

        Args:
            what: The operation, such as 'read run.json'; every error message begins with it.

        Raises:
            ObjectMissingError: The server returned 404.
            ObjectExistsError: The server returned 412.
            RangeBeyondError: The server returned 416.
            UploadGoneError: The multipart upload no longer exists.
            RefusedError: The server returned 403, or a different error that would recur.
            StoreError: The request did not succeed within `patience_s`.
        """
        client = self._client(what)
        until_s, silence = _silent.get(_host(client), (0.0, ""))
        if time.monotonic() < until_s:
            raise StoreError(f"{what} in {self._uri}: {silence}")
        try:
            yield client
        except FAILURES as error:
            verdict = judge(error)
            text = f"bucket {self.bucket} at {_host(client)}: {verdict.text}; {verdict.fix}"
            if verdict.kind is StoreError:
                text += f"; tried for {self.patience_s:.0f} s"
            if verdict.kind in _SHORT:
                text = f"{_SHORT[verdict.kind]} (at {_host(client)})"
            raise verdict.kind(f"{what} in {self._uri}: {text}") from error

    def head(self, what: str, full_key: str) -> "HeadObjectOutputTypeDef | None":
        """Return the description of an object; None if it does not exist. Raises StoreError."""
        try:
            with self.requests(what) as s3:
                return s3.head_object(Bucket=self.bucket, Key=full_key)
        except ObjectMissingError:
            return None

    def greet(self) -> None:
        """Make the first contact with the server. If it does not answer, later requests fail at
        once, also those of other clients.

        PATIENCE_S is for servers that restart. A server that does not answer the first request
        probably has the wrong address, and a program that reads several inputs would wait for it
        each time.
        """
        what = "reach the server"
        host = _host(self._client(what))
        _silent.pop(host, None)
        try:
            with self.requests(what) as s3:
                s3.head_bucket(Bucket=self.bucket)
        except (ObjectMissingError, RefusedError):
            return  # it answered, or the settings are wrong; the next request reports the problem
        except StoreError as error:
            _silent[host] = (time.monotonic() + PATIENCE_S, str(error))

    def _client(self, what: str) -> "BotoClient":
        with self._lock:
            if self._boto is None:
                try:
                    self._credentials = _Credentials()
                    self._boto = _make_client(self._credentials, self._try_s)
                except (BotoCoreError, ValueError) as error:
                    # ValueError: the endpoint is not a URL. Neither message contains a secret.
                    raise StoreError(
                        f"{what} in {self._uri}: {type(error).__name__}: {error}; correct the AWS "
                        "settings (environment, profile)"
                    ) from error
                register = self._boto.meta.events.register
                register("needs-retry.s3", self._pause_s)  # type: ignore[arg-type] # has a result
            return self._boto

    def _pause_s(
        self,
        response: tuple[Any, Any] | None,
        operation: Any,
        caught_exception: Exception | None,
        request_dict: dict[str, Any],
        **_: object,
    ) -> float | None:
        """Return after how many seconds botocore repeats a request; None if it does not."""
        context, url = request_dict["context"], urlsplit(request_dict["url"])
        place = f"{operation.name} {unquote(url.path)} at {url.scheme}://{url.netloc}"
        tries: Tries = context.setdefault("tries", Tries(self.patience_s))
        error = caught_exception
        if response is not None:
            if response[0].status_code < 300:
                tries.answered(place)
                return None
            error = ClientError(response[1], operation.name)
        if not isinstance(error, FAILURES):
            return None
        verdict = judge(error)
        text = f"{place}: {verdict.text}; {verdict.fix}"
        if verdict.kind is CredentialsError and "renewed" not in context:
            context["renewed"] = True
            log.warning("%s; fetching new credentials", text)
            self._credentials.renew()
            return 0.0
        if operation.name == "AbortMultipartUpload" and verdict.kind is not UploadGoneError:
            # The end of a block with an unfinished upload must not wait for a server that is away.
            log.warning("%s; `retrace traces sweep` can remove the unfinished upload", text)
            return None
        return tries.pause_s(text) if verdict.kind is StoreError else None


class _Credentials(Credentials):
    """The credentials that boto3 finds, and finds again if the server refuses them."""

    def __init__(self) -> None:
        super().__init__("", "")
        self.renew()

    def renew(self) -> None:
        """Look for the credentials again, in the environment, files and services."""
        self._found = Session().get_credentials()

    def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the credentials with which a request is signed."""
        if self._found is None:
            raise NoCredentialsError
        return self._found.get_frozen_credentials()

    def load_credentials(self) -> "_Credentials":
        """Return this object, as a session's provider of credentials does."""
        return self


def _make_client(credentials: _Credentials, try_s: float | None) -> "BotoClient":
    core = Session()
    core.register_component("credential_provider", credentials)
    session = boto3.session.Session(botocore_session=core)
    bundle = os.environ.get("AWS_CA_BUNDLE")
    if bundle and not Path(bundle).exists():
        # botocore would report the missing file only while connecting, as an error to be retried.
        raise ValueError(f"AWS_CA_BUNDLE: found {bundle}, which does not exist")
    styles: dict[str, Literal["path", "virtual"]] = {"true": "path", "false": "virtual"}
    path_style = os.environ.get(PATH_STYLE)
    if path_style is not None and path_style not in styles:
        raise ValueError(f"{PATH_STYLE}: found {path_style!r}, expected true or false")
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=_CONNECTIONS,
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
