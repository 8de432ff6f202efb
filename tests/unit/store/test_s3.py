"""The parts of the s3:// store that need no server: request planning, and kinds of failure."""

import subprocess
import sys

import boto3
import pytest
from botocore import exceptions as boto
from botocore.exceptions import ClientError
from botocore.stub import Stubber
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.tree import StoreSettings
from pipeline.store import ObjectExistsError, ObjectMissingError, RefusedError, StoreError
from pipeline.store.s3_errors import CredentialsError, RangeBeyondError, UploadGoneError, judge
from pipeline.store.s3_ranges import PIECE, spans
from pipeline.store.schemes import make_container
from pipeline.store.settings import environment, use_settings

sizes = st.one_of(st.integers(0, 3000), st.integers(0, 3 * PIECE))
offsets = st.one_of(st.integers(0, 20_000), st.integers(0, 10 * PIECE))


@given(st.lists(st.tuples(offsets, sizes), max_size=20))
def test_spans_fetch_every_range_and_few_other_bytes(ranges):
    """Each range is in exactly one span, and no request is larger than a piece. The other bytes of
    a span are at most 1/20 of the requested bytes or 4 KiB, whichever is more."""
    found = spans(ranges)
    members = [member for span in found for member in span.members]
    assert sorted(members) == [(n, *r) for n, r in enumerate(ranges) if r[1]]
    for span in found:
        for _, offset, length in span.members:
            assert span.offset <= offset
            assert offset + length <= span.end
        pieces = list(span.pieces())
        assert [a for a, _ in pieces[1:]] == [b for _, b in pieces[:-1]]
        assert (pieces[0][0], pieces[-1][1]) == (span.offset, span.end)
        assert all(0 < b - a <= PIECE for a, b in pieces)
        assert len(pieces) == 1 or len(span.members) == 1
        wanted = sum(length for _, _, length in span.members)
        assert span.end - span.offset <= wanted + max(4096, wanted // 20)


def test_neighbours_share_a_request():
    """The ranges are adjacent column chunks, as a pipeline stage reads them."""
    chunks = [(1000 + 75_000 * i, 75_000) for i in range(24)]
    [span] = spans(chunks)
    assert (span.offset, span.end) == (1000, 1000 + 24 * 75_000)
    assert len(spans([(0, 75_000), (75_000 * 24, 75_000)])) == 2


def answer(status: int, code: str) -> ClientError:
    body = {
        "Error": {"Code": code, "Message": "text"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(body, "PutObject")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (answer(404, "NoSuchKey"), ObjectMissingError),
        (answer(404, "404"), ObjectMissingError),
        (answer(404, "NoSuchUpload"), UploadGoneError),
        (answer(404, "NoSuchBucket"), RefusedError),
        (answer(409, "ConditionalRequestConflict"), StoreError),
        (answer(409, "BucketAlreadyExists"), RefusedError),
        (answer(412, "PreconditionFailed"), ObjectExistsError),
        (answer(416, "InvalidRange"), RangeBeyondError),
        (answer(403, "AccessDenied"), RefusedError),
        (answer(403, "403"), RefusedError),
        (answer(400, "ExpiredToken"), CredentialsError),
        (answer(403, "InvalidAccessKeyId"), CredentialsError),
        (answer(403, "RequestTimeTooSkewed"), RefusedError),
        (answer(400, "RequestTimeout"), StoreError),
        (answer(400, "BadDigest"), StoreError),
        (answer(400, "InvalidArgument"), RefusedError),
        (answer(429, "TooManyRequests"), StoreError),
        (answer(500, "InternalError"), StoreError),
        (answer(501, "NotImplemented"), RefusedError),
        (answer(503, "SlowDown"), StoreError),
        (boto.EndpointConnectionError(endpoint_url="http://x"), StoreError),
        (boto.ConnectionClosedError(endpoint_url="http://x"), StoreError),
        (boto.ReadTimeoutError(endpoint_url="http://x"), StoreError),
        (boto.ConnectTimeoutError(endpoint_url="http://x"), StoreError),
        (boto.IncompleteReadError(actual_bytes=1, expected_bytes=2), StoreError),
        (boto.SSLError(endpoint_url="https://x", error="EOF occurred"), StoreError),
        (boto.SSLError(endpoint_url="x", error="CERTIFICATE_VERIFY_FAILED"), RefusedError),
        (boto.NoCredentialsError(), RefusedError),
        (boto.ParamValidationError(report="x"), RefusedError),
    ],
)
def test_failures_are_classified(error, kind):
    verdict = judge(error)
    assert verdict.kind is kind
    assert verdict.text
    assert verdict.fix or kind in (ObjectMissingError, ObjectExistsError, RangeBeyondError)


def test_settings_reach_workers_as_environment_variables(monkeypatch):
    """For a setting that is None, workers use the value in their environment."""
    settings = StoreSettings(endpoint="https://host", path_style=True, ca_bundle="/ca.pem")
    assert environment(settings) == {
        "AWS_ENDPOINT_URL_S3": "https://host",
        "AWS_CA_BUNDLE": "/ca.pem",
        "RETRACE_S3_PATH_STYLE": "true",
    }
    assert environment(StoreSettings()) == {}
    for name in (*environment(settings), "AWS_REGION"):
        monkeypatch.setenv(name, "before")
    use_settings(StoreSettings(region="eu-1", path_style=False))
    program = "import os; print(os.environ['AWS_REGION'], os.environ['RETRACE_S3_PATH_STYLE'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["eu-1", "false"]


@pytest.mark.parametrize("there", [True, False])
def test_a_missing_bucket_is_created(there, monkeypatch):
    client = boto3.client("s3", region_name="us-east-1", endpoint_url="http://localhost")
    monkeypatch.setattr("pipeline.store.s3_client._make_client", lambda *arguments: client)
    with Stubber(client) as server:
        if there:
            server.add_response("head_bucket", {}, {"Bucket": "my-bucket"})
        else:
            server.add_client_error("head_bucket", "404", http_status_code=404)
            server.add_response("create_bucket", {}, {"Bucket": "my-bucket"})
        assert make_container("s3://my-bucket/runs", 1.0) is not there
        server.assert_no_pending_responses()
