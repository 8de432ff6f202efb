"""What to do about a request to S3 that failed, and what to tell the user."""

from dataclasses import dataclass
from enum import Enum

from botocore import exceptions as boto
from botocore.exceptions import BotoCoreError, ClientError
from urllib3.exceptions import HTTPError

FAILURES = (BotoCoreError, ClientError, HTTPError)
"""Everything that a request may raise; the last while an answer's body is read."""


class Kind(Enum):
    """What a failed request asks for."""

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
    said: str
    """What the server, or the library, said."""
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
# Damaged or cut off on the way: S3 answers 400, but the next try may arrive whole.
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
    """What kind of failure one of FAILURES is."""
    if isinstance(error, ClientError):
        return _judge_answer(error)
    said = f"{type(error).__name__}: {error}"
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return Verdict(Kind.FATAL, said, "name the CA file (AWS_CA_BUNDLE, store.ca_bundle)")
    if isinstance(
        error,
        # An answer that ended early or was damaged, and whatever else connections suffer.
        boto.HTTPClientError
        | boto.ConnectionError
        | boto.IncompleteReadError
        | boto.FlexibleChecksumError
        | HTTPError,
    ):
        return Verdict(Kind.RETRY, said, _SERVER_FIX)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return Verdict(Kind.FATAL, said, _KEYS_FIX)
    return Verdict(Kind.FATAL, said, "correct the AWS settings (environment, profile)")


def _judge_answer(error: ClientError) -> Verdict:
    """Judge what the server said. An answer to HEAD has a status but no code and no text."""
    answer = error.response
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    code = answer.get("Error", {}).get("Code", "")
    said = f"the server said {status} {code}: {answer.get('Error', {}).get('Message', '')}"
    if code == "NoSuchBucket":
        return Verdict(Kind.FATAL, said, "create the bucket, or name another one")
    if code == "NoSuchUpload":
        fix = "another process has completed or swept it: make the object again"
        return Verdict(Kind.GONE, said, fix)
    if status == 404:
        return Verdict(Kind.MISSING, said, "")
    if status == 412:
        return Verdict(Kind.EXISTS, said, "")
    if status == 416:
        return Verdict(Kind.BEYOND, said, "")
    if code in _CREDENTIALS:
        return Verdict(Kind.CREDENTIALS, said, _KEYS_FIX)
    if code in _CONFLICTS | _DAMAGED | _BUSY or status == 429:
        return Verdict(Kind.RETRY, said, _SERVER_FIX)
    if status == 501:  # the server knows the request and will never serve it
        return Verdict(Kind.FATAL, said, "use a server with this part of S3")
    if status >= 500:
        return Verdict(Kind.RETRY, said, _SERVER_FIX)
    if code == "RequestTimeTooSkewed":
        return Verdict(Kind.FATAL, said, "set this machine's clock")
    if status == 403:
        return Verdict(Kind.FATAL, said, _PERMISSION_FIX)
    return Verdict(Kind.FATAL, said, "correct the place or the AWS settings")
