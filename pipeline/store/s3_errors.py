"""Classification of failed S3 requests by the client's next action, and the user's fix for each."""

from dataclasses import dataclass
from enum import Enum

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

FAILURES = (BotoCoreError, ClientError, HTTPError)
"""All exceptions that a request may raise. Reading a response's body raises HTTPError."""


class Kind(Enum):
    """Kinds of failure, classified by their consequence."""

    MISSING = "the object does not exist"
    EXISTS = "a condition did not hold: the object exists"
    GONE = "the multipart upload was completed, aborted or swept"
    BEYOND = "the range begins beyond the object's end"
    RETRY = "the same request may succeed later"
    CREDENTIALS = "it may succeed with new credentials"
    FATAL = "it will fail again"


@dataclass(frozen=True)
class Verdict:
    """A classified failure."""

    kind: Kind
    text: str
    """The message of the server or library."""
    fix: str
    """The user's next step."""


_CREDENTIALS = {
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "InvalidTokenId",
    "TokenRefreshRequired",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
}
# The request was damaged or cut off in transit. S3 returns 400, but the next try may succeed.
_DAMAGED = {"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch"}
_BUSY = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
_CONFLICTS = {"ConditionalRequestConflict", "OperationAborted"}

_SERVER_FIX = "check that the server runs and is reachable (AWS_ENDPOINT_URL, store.endpoint)"
_KEYS_FIX = (
    "pass valid credentials (environment, AWS_PROFILE or web identity), then run the same "
    "command again"
)
_PERMISSION_FIX = (
    "the credentials need s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload, "
    "s3:ListMultipartUploadParts, s3:ListBucket and s3:ListBucketMultipartUploads there"
)


def judge(error: Exception) -> Verdict:
    """Classify an exception whose type is in FAILURES."""
    if isinstance(error, ClientError):
        return _judge_answer(error)
    text = f"{type(error).__name__}: {error}"
    if "CERTIFICATE_VERIFY_FAILED" in text:
        return Verdict(Kind.FATAL, text, "name the CA file (AWS_CA_BUNDLE, store.ca_bundle)")
    if isinstance(
        error,
        # Truncated or damaged responses, and all other connection errors.
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
    """Classify a server's response. A response to HEAD has a status, but no code or message."""
    answer = error.response
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = answer.get("Error", {}).get("Code", "")
    text = f"the server answered {status} {code}: {answer.get('Error', {}).get('Message', '')}"
    if code == "NoSuchBucket":
        return Verdict(Kind.FATAL, text, "create the bucket, or name a different bucket")
    if code == "NoSuchUpload":
        fix = "another process completed or swept this upload: write the object again"
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
        return Verdict(Kind.FATAL, text, "use a server that implements this part of S3")
    if status >= 500:
        return Verdict(Kind.RETRY, text, _SERVER_FIX)
    if code == "RequestTimeTooSkewed":
        return Verdict(Kind.FATAL, text, "set this machine's clock")
    if status == 403:
        return Verdict(Kind.FATAL, text, _PERMISSION_FIX)
    return Verdict(Kind.FATAL, text, "correct the store's URI or the AWS settings")
