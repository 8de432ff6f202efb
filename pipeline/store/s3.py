"""The s3:// store, which contains objects below a prefix of a bucket.

upload            s3_upload: boto3's managed transfer, in bounded memory
read_ranges       s3_ranges: neighbouring ranges in one request, several requests in parallel
every request     s3_client: credentials, retries, errors; s3_errors: classification of failures
"""

import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import TYPE_CHECKING

from pipeline.store.base import (
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    Store,
    StoreError,
    UnreadableError,
    check_key,
)
from pipeline.store.s3_client import GREETING_S, PATIENCE_S, S3Client, Tries
from pipeline.store.s3_errors import FAILURES, RangeBeyondError, UploadGoneError
from pipeline.store.s3_ranges import PIECE, spans
from pipeline.store.s3_upload import S3Upload
from pipeline.threads import in_order

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client as BotoClient
    from mypy_boto3_s3.type_defs import MultipartUploadTypeDef

_AT_ONCE = 8
"""Maximum number of requests of one read that are sent in parallel."""
_PROBE_PATIENCE_S = 8.0
_OWNER = "retrace-upload"
"""The metadata key that contains the random name of the `create` that made the object."""
_SCHEME = "s3://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class S3Store(Store):
    """Stores objects in a bucket, each under `<prefix>/<key>`.

    A forked child can use its parent's store. A pickled store consists of its URI and its patience.
    """

    def __init__(self, uri: str, patience_s: float = PATIENCE_S) -> None:
        self._bucket, prefix = _parse(uri)
        self._root = f"{prefix}/" if prefix else ""
        self.uri = f"{_SCHEME}{self._bucket}/{prefix}".rstrip("/")
        self._patience_s = patience_s
        self._clients: dict[int, S3Client] = {}

    @property
    def _client(self) -> S3Client:
        """The client of this process.

        Its threads and connections do not survive a fork. The parent's client stays here, because
        removing it could wait forever for a lock that a thread of the parent holds.
        """
        process = os.getpid()
        if process not in self._clients:
            self._clients.setdefault(process, S3Client(self._bucket, self.uri, self._patience_s))
        return self._clients[process]

    def __reduce__(self) -> tuple[type["S3Store"], tuple[str, float]]:
        return S3Store, (self.uri, self._patience_s)

    def create(self, key: str, data: bytes) -> None:
        """See Store.create."""
        full, what, token = self._full(key), f"create {key}", secrets.token_hex(8)
        try:
            with self._client.requests(what) as s3:
                s3.put_object(
                    Bucket=self._bucket,
                    Key=full,
                    Body=BytesIO(data),  # is sent in pieces, each with its own time limit
                    IfNoneMatch="*",
                    Metadata={_OWNER: token},
                )
        except ObjectExistsError:
            # The object is ours if the response to an earlier try was lost.
            found = self._client.head(what, full)
            if found is None or found["Metadata"].get(_OWNER) != token:
                raise

    def upload(self, key: str) -> S3Upload:
        """See Store.upload. Replaces an existing object."""
        return S3Upload(self._client, f"create {key}", self._full(key))

    def read(self, key: str, limit: int | None = None) -> bytes:
        """See Store.read."""
        first, size = self._read_piece(key, 0, PIECE)
        if limit is not None and size > limit:
            raise UnreadableError(
                f"read {key} in {self.uri}: {size} bytes, expected at most {limit}"
            )
        if len(first) == size:
            return first
        return first + self.read_range(key, PIECE, size - PIECE)

    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], size: int | None = None
    ) -> list[bytes]:
        """See Store.read_ranges. Objects never change, so separately read pieces fit together.

        Args:
            key: The object.
            ranges: Offset and length of each range, in bytes.
            size: Expected size of the object in bytes; None allows any size.
        """
        found = spans(ranges)
        if not found:  # a response to a read would contain the size
            there = self.size(key)
            if there is None:
                raise ObjectMissingError(f"read {key} in {self.uri}: no such object")
            self._require_size(key, there, size)
        # Made when they are sent, because the first response may refuse a wrong size.
        pieces = (piece for span in found for piece in span.pieces())
        answers = in_order(lambda piece: self._read_piece(key, *piece, size)[0], pieces, _AT_ONCE)
        result = [b""] * len(ranges)
        for span in found:
            data = b"".join([next(answers) for _ in span.pieces()])
            for number, offset, length in span.members:
                start = offset - span.offset
                part = data if length == len(data) else data[start : start + length]
                if len(part) != length:
                    raise StoreError(
                        f"read {key} in {self.uri}: {len(part)} bytes at {offset}, expected "
                        f"{length}"
                    )
                result[number] = part
        return result

    def _read_piece(
        self, key: str, offset: int, end: int, size: int | None = None
    ) -> tuple[bytes, int]:
        """Return the bytes up to `end`, fewer if the object ends earlier, and the object's size.

        If the object ends before `offset`, the size is not known and 0.
        """
        full, what, tries = self._full(key), f"read {key}", Tries(self._patience_s)
        wanted, data = f"bytes={offset}-{end - 1}", None
        try:
            while data is None:
                with self._client.requests(what) as s3:
                    answer = s3.get_object(Bucket=self._bucket, Key=full, Range=wanted)
                    try:
                        with answer["Body"] as body:
                            data = body.read()
                    except FAILURES as error:
                        pause_s = tries.pause_s(f"{what} in {self.uri}: {error}")
                        if pause_s is None:
                            raise
                        time.sleep(pause_s)
        except RangeBeyondError as error:
            if size is not None:
                raise UnreadableError(f"{error}, expected {size} bytes") from error
            return b"", 0
        described = answer.get("ContentRange", "")
        match = _CONTENT_RANGE.fullmatch(described)
        if match is None or int(match[1]) != offset or len(data) != int(match[2]) + 1 - offset:
            raise StoreError(
                f"{what} in {self.uri}: the server sent {len(data)} bytes as {described!r}, "
                f"expected {wanted}; use a server that serves ranges"
            )
        self._require_size(key, int(match[3]), size)
        return data, int(match[3])

    def _require_size(self, key: str, found: int, expected: int | None) -> None:
        if expected is not None and found != expected:
            raise UnreadableError(f"read {key} in {self.uri}: {found} bytes, expected {expected}")

    def size(self, key: str) -> int | None:
        """See Store.size."""
        try:
            found = self._client.head(f"read {key}", self._full(key))
        except RefusedError:
            # Only the response to GET, not the response to HEAD, contains the reason for a refusal.
            return self._read_piece(key, 0, 1)[1]
        return None if found is None else found["ContentLength"]

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store.list."""
        with self._client.requests(f"list {prefix}") as s3:
            pages = s3.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._root + prefix
            )
            for page in pages:
                for item in page.get("Contents", ()):
                    key = item["Key"].removeprefix(self._root)
                    yield ObjectInfo(key, item["Size"], item["LastModified"].timestamp())

    def delete(self, key: str) -> None:
        """See Store.delete."""
        with self._client.requests(f"delete {key}") as s3:
            s3.delete_object(Bucket=self._bucket, Key=self._full(key))

    def debris(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store.debris. The debris consists of multipart uploads.

        MinIO does not list uploads that began before its last start, but removes them after a day.
        """
        with self._client.requests(f"list {prefix}") as s3:
            # Of the whole bucket, because MinIO treats a prefix as the full name of an object.
            for page in s3.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket):
                for item in page.get("Uploads", ()):
                    if item["Key"].startswith(self._root + prefix):
                        yield self._unfinished(s3, item)

    def _unfinished(self, s3: "BotoClient", item: "MultipartUploadTypeDef") -> ObjectInfo:
        """Return an upload with the total size of its parts and the time of its latest part."""
        size, modified_s = 0, item["Initiated"].timestamp()
        pages = s3.get_paginator("list_parts").paginate(
            Bucket=self._bucket, Key=item["Key"], UploadId=item["UploadId"]
        )
        try:
            with self._client.requests(f"list {item['Key']}"):
                for part in (part for page in pages for part in page.get("Parts", ())):
                    size += part["Size"]
                    modified_s = max(modified_s, part["LastModified"].timestamp())
        except (UploadGoneError, ObjectMissingError):
            pass  # the upload has ended since it was listed
        return ObjectInfo(item["Key"].removeprefix(self._root), size, modified_s, item["UploadId"])

    def discard(self, info: ObjectInfo) -> None:
        """See Store.discard."""
        if not info.upload:
            raise StoreError(f"discard {info.key} in {self.uri}: this is an object, not debris")
        try:
            with self._client.requests(f"discard {info.key}") as s3:
                s3.abort_multipart_upload(
                    Bucket=self._bucket, Key=self._full(info.key), UploadId=info.upload
                )
        except UploadGoneError:
            return

    def probe(self) -> None:
        """See Store.probe. Raises StoreError if the server ignores If-None-Match.

        Without If-None-Match, the second writer of a commit would silently replace the first
        writer's commit.
        """
        store = S3Store(self.uri, _PROBE_PATIENCE_S)
        key = f"probe.{secrets.token_hex(4)}"
        store.create(key, b"first")
        try:
            store.create(key, b"second")
        except ObjectExistsError:
            return
        finally:
            store.delete(key)
        raise StoreError(
            f"create {key} in {self.uri}: PutObject with If-None-Match replaced an object: this "
            "server, or a proxy in front of it, ignores conditional writes, so two writers of a "
            "commit would overwrite each other; use AWS S3, MinIO or another server with "
            "conditional writes"
        )

    def greet(self) -> None:
        """Make the first contact with the server; see pipeline.store.schemes.greet."""
        S3Client(self._bucket, self.uri, GREETING_S, GREETING_S / 2).greet()

    def make_bucket(self, patience_s: float) -> bool:
        """Create the bucket if it is missing; see pipeline.store.schemes.make_container."""
        client = S3Client(self._bucket, self.uri, patience_s)
        try:
            with client.requests("look for the bucket") as s3:
                s3.head_bucket(Bucket=self._bucket)
        except ObjectMissingError:
            with client.requests("create the bucket") as s3:
                s3.create_bucket(Bucket=self._bucket)
            return True
        return False

    def _full(self, key: str) -> str:
        check_key(key)
        return self._root + key


def _parse(uri: str) -> tuple[str, str]:
    """Split a URI into bucket and prefix. Raises StoreError, without secrets in its message."""
    bucket, _, prefix = uri.removeprefix(_SCHEME).partition("/")
    if "@" in bucket:
        raise StoreError(
            "store s3://...: found an @ before the path, but credentials are never part of a URI; "
            "pass them in the environment or a profile"
        )
    if not _BUCKET.fullmatch(bucket):
        raise StoreError(
            f"store {uri!r}: {bucket!r} is not a valid bucket name; use the form s3://BUCKET/PREFIX"
        )
    prefix = prefix.rstrip("/")
    if prefix:
        check_key(prefix)
    return bucket, prefix
