"""Judgement of failed requests to S3: what the client does next, and what the user can do."""

from dataclasses import dataclass
from enum import Enum

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

FAILURES = (BotoCoreError, ClientError, HTTPError)
"""All exceptions that a request may raise; the last one comes from reading an answer's body."""


class Kind(Enum):
    """Kinds of failure, by what must follow."""

    MISSING = "there is no such object"
    EXISTS = "a condition did not hold: the object is there"
    GONE = "the multipart upload was completed, aborted or swept"
    BEYOND = "the range begins behind the object's end"
    RETRY = "the same request may succeed later"
    CREDENTIALS = "it may succeed with credentials fetched anew"
    FATAL = "it will fail again"


@dataclass(frozen=True)
class Verdict:
    """A judged failure."""

    kind: Kind
    text: str
    """The server's or library's own message."""
    fix: str
    """What the user can do."""


_CREDENTIALS = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "InvalidTokenId",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
}
# Damaged or cut off in transit: S3 answers 400, but the next try may arrive intact.
_DAMAGED = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch"}
_BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
_CONFLICTS = {"ConditionalRequestConflict", "OperationAborted"}

_SERVER_FIX = "look whether the server runs and is reached (AWS_ENDPOINT_URL, store.endpoint)"
_KEYS_FIX = (
    "give valid credentials (environment, AWS_PROFILE or web identity), then run the same "
    "command again"
)
_PERMISSION_FIX = (
    "the credentials need s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload, "
    "s3:ListMultipartUploadParts, s3:ListBucket and s3:ListBucketMultipartUploads there"
)


def judge(error: Exception) -> Verdict:
    """Judge one of FAILURES."""
    if isinstance(error, ClientError):
        return _judge_answer(error)
    text = f"{type(error).__name__}: {error}"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return Verdict(Kind.FATAL, text, "name the CA file (AWS_CA_BUNDLE, store.ca_bundle)")
    if isinstance(
        error,
        # Truncated or damaged answers, and all other connection errors.
        boto.HTTPClientError
        | boto.ConnectionError
        | boto.IncompleteReadError
        | boto.FlexibleChecksumError
        | HTTPError,
    ):
        return Verdict(Kind.RETRY, text, _SERVER_FIX)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return Verdict(Kind.FATAL, text, _KEYS_FIX)
    return Verdict(Kind.FATAL, text, "correct the AWS settings (environment, profile)")


def _judge_answer(error: ClientError) -> Verdict:
    """Judge a server's answer. An answer to HEAD has a status but no code and no message."""
    answer = error.response
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = answer.get("Error", {}).get("Code", "")
    text = f"the server said {status} {code}: {answer.get('Error', {}).get('Message', '')}"
    if code == "NoSuchBucket":
        return Verdict(Kind.FATAL, text, "create the bucket, or name another one")
    if code == "NoSuchUpload":
        fix = "another process has completed or swept it: make the object again"
        return Verdict(Kind.GONE, text, fix)
    if status == 404:
        return Verdict(Kind.MISSING, text, "")
    if status == 412:
        return Verdict(Kind.EXISTS, text, "")
    if status == 416:
        return Verdict(Kind.BEYOND, text, "")
    if code in _CREDENTIALS:
        return Verdict(Kind.CREDENTIALS, text, _KEYS_FIX)
    if code in _CONFLICTS | _DAMAGED | _BUSY or status == 429:
        return Verdict(Kind.RETRY, text, _SERVER_FIX)
    if status == 501:  # the server does not implement the request
        return Verdict(Kind.FATAL, text, "use a server with this part of S3")
    if status >= 500:
        return Verdict(Kind.RETRY, text, _SERVER_FIX)
    if code == "RequestTimeTooSkewed":
        return Verdict(Kind.FATAL, text, "set this machine's clock")
    if status == 403:
        return Verdict(Kind.FATAL, text, _PERMISSION_FIX)
    return Verdict(Kind.FATAL, text, "correct the place or the AWS settings")
