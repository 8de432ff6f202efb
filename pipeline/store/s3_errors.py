"""Classification of failed S3 requests by the error to raise, and the user's fix for each."""

from dataclasses import dataclass

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

from pipeline.store.base import ObjectExistsError, ObjectMissingError, RefusedError, StoreError

FAILURES = (BotoCoreError, ClientError, HTTPError)
"""All exceptions that a request may raise. Reading a response's body raises HTTPError."""


class RangeBeyondError(StoreError):
    """The first requested byte is beyond the object's end."""


class UploadGoneError(StoreError):
    """The multipart upload was completed, aborted or removed."""


class CredentialsError(RefusedError):
    """The server refused the credentials; the request may succeed with new ones."""


@dataclass(frozen=True)
class Verdict:
    """A classified failure."""

    kind: type[StoreError]
    """The error to raise. Only if it is StoreError itself, the same request may succeed later."""
    text: str
    """The message of the server or library."""
    fix: str
    """The user's next step."""


_CREDENTIALS = {
    "ExpiredToken", "ExpiredTokenException", "InvalidToken", "InvalidTokenId",
    "TokenRefreshRequired", "InvalidAccessKeyId", "SignatureDoesNotMatch",
}  # fmt: skip
# The next try may succeed, although S3 answers 4xx: the request was damaged or cut off in transit,
# the server is busy, or another request is changing the same object.
_PASSING = {
    "BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch",
    "SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded",
    "ConditionalRequestConflict", "OperationAborted",
}  # fmt: skip
_CONNECTION = (
    boto.HTTPClientError, boto.ConnectionError, HTTPError,
    boto.IncompleteReadError, boto.FlexibleChecksumError,  # truncated and damaged responses
)  # fmt: skip
_ANSWERS: dict[int, type[StoreError]] = {
    404: ObjectMissingError,
    412: ObjectExistsError,
    416: RangeBeyondError,
}

_SERVER_FIX = "check that the server runs and is reachable (AWS_ENDPOINT_URL, store.endpoint)"
_SETTINGS_FIX = "correct the store's URI or the AWS settings (environment, profile)"
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
        return Verdict(RefusedError, text, "name the CA file (AWS_CA_BUNDLE, store.ca_bundle)")
    if isinstance(error, _CONNECTION):
        return Verdict(StoreError, text, _SERVER_FIX)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return Verdict(RefusedError, text, _KEYS_FIX)
    return Verdict(RefusedError, text, _SETTINGS_FIX)


def _judge_answer(error: ClientError) -> Verdict:
    """Classify a server's response. A response to HEAD has a status, but no code or message."""
    answer = error.response
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = answer.get("Error", {}).get("Code", "")
    text = f"the server answered {status} {code}: {answer.get('Error', {}).get('Message', '')}"
    if code == "NoSuchBucket":
        return Verdict(RefusedError, text, "create the bucket, or name a different bucket")
    if code == "NoSuchUpload":
        fix = "another process completed or swept this upload: write the object again"
        return Verdict(UploadGoneError, text, fix)
    if status in _ANSWERS:
        return Verdict(_ANSWERS[status], text, "")
    if code in _CREDENTIALS:
        return Verdict(CredentialsError, text, _KEYS_FIX)
    if status == 501:  # the server does not implement the request
        return Verdict(RefusedError, text, "use a server that implements this part of S3")
    if code in _PASSING or status == 429 or status >= 500:
        return Verdict(StoreError, text, _SERVER_FIX)
    if code == "RequestTimeTooSkewed":
        return Verdict(RefusedError, text, "set this machine's clock")
    return Verdict(RefusedError, text, _PERMISSION_FIX if status == 403 else _SETTINGS_FIX)
