"""The s3:// store, which contains objects below a prefix of a bucket.

create, upload    s3_upload: conditional PutObject, or multipart upload in bounded memory
read_ranges       s3_ranges: neighbouring ranges in one request, several requests in parallel
every request     s3_client: credentials, retries, errors; s3_errors: classification of failures
"""

import os
import re
import secrets
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from pipeline.store.base import (
    ObjectExistsError,
    ObjectInfo,
    ObjectMissingError,
    RefusedError,
    StoreError,
    UnreadableError,
    check_key,
    file_pieces,
)
from pipeline.store.s3_client import PATIENCE_S, RangeBeyondError, S3Client, greet
from pipeline.store.s3_debris import discard_upload, unfinished_uploads
from pipeline.store.s3_ranges import PIECE, spans
from pipeline.store.s3_upload import MAX_PARTS, PART, S3Upload

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client as BotoClient
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

_THREADS = 8
_MUCH = 64 << 20
"""Before reading more bytes than this, a call compares the object's size with the expected size."""
_PROBE_PATIENCE_S = 8.0
_SCHEME = "s3://"
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_OPEN: "WeakSet[S3Store]" = WeakSet()
"""The stores of this process, and those that it inherited from its parent."""


class S3Store:
    """Stores objects in a bucket, each under `<prefix>/<key>`.

    A forked child can use its parent's store. A pickled store consists of its URI and its patience.
    """

    def __init__(self, uri: str, patience_s: float = PATIENCE_S) -> None:
        self._bucket, prefix = _parse(uri)
        self._root = f"{prefix}/" if prefix else ""
        self.uri = f"{_SCHEME}{self._bucket}/{prefix}".rstrip("/")
        self._patience_s = patience_s
        self._used: list[tuple[S3Client, ThreadPoolExecutor]] = []
        self._start()
        _OPEN.add(self)

    def _start(self) -> None:
        self._client = S3Client(self._bucket, self.uri, self._patience_s)
        self._pool = ThreadPoolExecutor(_THREADS, "s3")
        # Removing a parent's client in a child could wait forever, because a thread that exists
        # only in the parent may hold one of the client's locks. So all clients are kept.
        self._used.append((self._client, self._pool))

    def __reduce__(self) -> tuple[type["S3Store"], tuple[str, float]]:
        return S3Store, (self.uri, self._patience_s)

    def create(self, key: str, data: bytes) -> None:
        """See Store.create."""
        with self.upload(key) as upload:
            upload.write(data)
            upload.finish()

    def create_from_file(self, key: str, path: Path) -> None:
        """See Store.create_from_file."""
        with file_pieces(path, PIECE, f"create {key} in {self.uri}") as (size, pieces):
            if size > PART and self.size(key) is not None:
                # The server would also refuse the upload, but only after receiving all of it.
                raise ObjectExistsError(f"create {key} in {self.uri}: the object already exists")
            part_size = max(PART, -(-size // MAX_PARTS))
            with self._upload(key, part_size) as upload:
                for piece in pieces:
                    upload.write(piece)
                upload.finish()

    def upload(self, key: str) -> S3Upload:
        """See Store.upload."""
        return self._upload(key, PART)

    def _upload(self, key: str, part_size: int) -> S3Upload:
        return S3Upload(self._client, self._pool, key, self._full(key), part_size)

    def read(self, key: str, limit: int | None = None) -> bytes:
        """See Store.read."""
        full = self._full(key)
        at_once = 2 * PIECE if limit is None else min(limit, 2 * PIECE)

        def request(client: "BotoClient") -> bytes | int:
            answer = client.get_object(Bucket=self._bucket, Key=full)
            with answer["Body"] as body:
                size = answer["ContentLength"]
                return size if size > at_once else body.read()

        found = self._client.call(f"read {key}", "GetObject", request)
        if isinstance(found, bytes):
            return found
        if limit is not None and found > limit:
            raise UnreadableError(
                f"read {key} in {self.uri}: {found} bytes, expected at most {limit}"
            )
        return self.read_range(key, 0, found)  # large objects are read in parallel requests

    def read_range(self, key: str, offset: int, length: int) -> bytes:
        """See Store.read_range.

        Args:
            key: The object.
            offset: First byte.
            length: Number of bytes.
        """
        return self.read_ranges(key, [(offset, length)])[0]

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
        # The response contains the size, so a small read needs only one request.
        if not found or (
            size is not None and sum(span.end - span.offset for span in found) > _MUCH
        ):
            there = self.size(key)
            if there is None:
                raise ObjectMissingError(f"read {key} in {self.uri}: no such object")
            self._require_size(key, there, size)
        pieces = [piece for span in found for piece in span.pieces()]
        answers = self._read_pieces(key, pieces, size)
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

    def _read_pieces(
        self, key: str, pieces: Sequence[tuple[int, int]], size: int | None
    ) -> Iterator[bytes]:
        """Yield the bytes of each (offset, end), in order; fewer if the object ends earlier."""
        if len(pieces) == 1:
            yield self._read_piece(key, *pieces[0], size, None)
            return
        stop = threading.Event()
        futures = [self._pool.submit(self._read_piece, key, *piece, size, stop) for piece in pieces]
        try:
            for future in futures:
                yield future.result()
        finally:
            # After an error, the other pieces are not needed.
            stop.set()
            for future in futures:
                future.cancel()

    def _read_piece(
        self, key: str, offset: int, end: int, size: int | None, stop: threading.Event | None
    ) -> bytes:
        full, what = self._full(key), f"read {key}"
        wanted = f"bytes={offset}-{end - 1}"

        def request(client: "BotoClient") -> tuple[str, bytes]:
            answer = client.get_object(Bucket=self._bucket, Key=full, Range=wanted)
            with answer["Body"] as body:
                return answer.get("ContentRange", ""), body.read()

        try:
            described, data = self._client.call(what, "GetObject", request, stop)
        except RangeBeyondError:
            return b""
        match = _CONTENT_RANGE.fullmatch(described)
        if match is None or int(match[1]) != offset or len(data) != int(match[2]) + 1 - offset:
            raise StoreError(
                f"{what} in {self.uri}: the server sent {len(data)} bytes as {described!r}, "
                f"expected {wanted}; use a server that serves ranges"
            )
        self._require_size(key, int(match[3]), size)
        return data

    def _require_size(self, key: str, found: int, expected: int | None) -> None:
        if expected is not None and found != expected:
            raise UnreadableError(f"read {key} in {self.uri}: {found} bytes, expected {expected}")

    def size(self, key: str) -> int | None:
        """See Store.size."""
        full, what = self._full(key), f"read {key}"
        try:
            answer = self._client.call(
                what, "HeadObject", lambda c: c.head_object(Bucket=self._bucket, Key=full)
            )
        except ObjectMissingError:
            return None
        except RefusedError:
            # Only the response to GET, not the response to HEAD, contains the reason for a refusal.
            return self._size_by_get(key)
        return answer["ContentLength"]

    def _size_by_get(self, key: str) -> int | None:
        full = self._full(key)

        def request(client: "BotoClient") -> int:
            answer = client.get_object(Bucket=self._bucket, Key=full)
            with answer["Body"]:
                return answer["ContentLength"]

        try:
            return self._client.call(f"read {key}", "GetObject", request)
        except ObjectMissingError:
            return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store.list."""
        token: str | None = None
        while True:
            page = self._list_page(prefix, token)
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._root)
                yield ObjectInfo(key, item["Size"], item["LastModified"].timestamp())
            if not page["IsTruncated"]:
                return
            token = page["NextContinuationToken"]

    def _list_page(self, prefix: str, token: str | None) -> "ListObjectsV2OutputTypeDef":
        full = self._root + prefix

        def request(client: "BotoClient") -> "ListObjectsV2OutputTypeDef":
            if token is None:
                return client.list_objects_v2(Bucket=self._bucket, Prefix=full)
            return client.list_objects_v2(Bucket=self._bucket, Prefix=full, ContinuationToken=token)

        return self._client.call(f"list {prefix}", "ListObjectsV2", request)

    def delete(self, key: str) -> None:
        """See Store.delete."""
        full = self._full(key)
        self._client.call(
            f"delete {key}",
            "DeleteObject",
            lambda c: c.delete_object(Bucket=self._bucket, Key=full),
        )

    def debris(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store.debris. The debris consists of multipart uploads.

        MinIO does not list uploads that began before its last start, but removes them after a day.
        """
        return unfinished_uploads(self._client, self._root, prefix)

    def discard(self, info: ObjectInfo) -> None:
        """See Store.discard."""
        if not info.upload:
            raise StoreError(f"discard {info.key} in {self.uri}: this is an object, not debris")
        discard_upload(self._client, self._full(info.key), info.upload)

    def probe(self) -> None:
        """See Store.probe. Raises StoreError if the server ignores If-None-Match.

        Without If-None-Match, the second writer of a commit would silently replace the first
        writer's commit.
        """
        store = S3Store(self.uri, _PROBE_PATIENCE_S)
        key = f"probe.{secrets.token_hex(4)}"
        store.create(key, b"first")
        try:
            for operation in ("PutObject", "CompleteMultipartUpload"):
                with store.upload(key) as upload:
                    upload.write(b"second")
                    if operation != "PutObject":
                        upload.begin()
                    try:
                        upload.finish()
                    except ObjectExistsError:
                        continue
                raise StoreError(
                    f"create {key} in {self.uri}: {operation} with If-None-Match replaced an "
                    "object: this server, or a proxy in front of it, ignores conditional writes, "
                    "so two writers of an object would overwrite each other; use AWS S3, MinIO or "
                    "another server with conditional writes"
                )
        finally:
            store.delete(key)

    def _full(self, key: str) -> str:
        check_key(key)
        return self._root + key


def _start_again() -> None:
    """Give a forked child its own threads and connections, which do not survive a fork."""
    for store in list(_OPEN):
        store._start()


os.register_at_fork(after_in_child=_start_again)


def greet_server(uri: str) -> None:
    """Make the first contact with a store's server; see `greet`. Raises StoreError."""
    greet(_parse(uri)[0], uri)


def make_bucket(uri: str, patience_s: float) -> bool:
    """Create a store's bucket if it is missing; return whether it was missing.

    Raises StoreError.
    """
    bucket, _ = _parse(uri)
    client = S3Client(bucket, uri, patience_s)
    try:
        client.call("look for the bucket", "HeadBucket", lambda s3: s3.head_bucket(Bucket=bucket))
    except ObjectMissingError:
        client.call("create the bucket", "CreateBucket", lambda s3: s3.create_bucket(Bucket=bucket))
        return True
    return False


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
