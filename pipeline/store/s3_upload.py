"""The upload of an object to S3, by PutObject or, for a large object, by multipart upload."""

import base64
import logging
import secrets
import threading
import zlib
from collections import deque
from concurrent.futures import Executor, Future, wait
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from pipeline.store.base import ObjectExistsError, ObjectMissingError, StoreError
from pipeline.store.s3_client import S3Client, UploadGoneError

if TYPE_CHECKING:
    from mypy_boto3_s3.type_defs import CompletedPartTypeDef

log = logging.getLogger(__name__)

PART = 8 << 20
"""Size of a part in bytes, and the maximum size of an object sent with PutObject."""
IN_FLIGHT = 4
"""Maximum number of parts sent in parallel. An upload takes less than 64 MiB of memory, including
the part being filled and the extra eighth that Python allocates for each buffer."""
MAX_PARTS = 10_000
"""S3's limit on the number of parts in a multipart upload."""
_PIECE = 64 << 10
_OWNER = "retrace-upload"
"""The metadata key that contains the random name of the upload that created the object."""


class _Body:
    """A file object over bytes, read in pieces so that a send's time limit covers only one piece.

    urllib3 sends plain bytes with one `sendall`, whose limit (the connection timeout) covers all
    bytes. A store that accepts 1 MB/s would therefore never receive a complete part of an upload.
    botocore reads the body twice, to compute its signature and to send it.
    """

    def __init__(self, data: bytes | bytearray) -> None:
        self._data = memoryview(data)
        self._at = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes: at most `size`, and at most one piece; b"" at the end."""
        end = len(self) if size < 0 else self._at + min(size, _PIECE)
        piece = bytes(self._data[self._at : end])
        self._at += len(piece)
        return piece

    def tell(self) -> int:
        """Return the offset of the next read."""
        return self._at

    def seek(self, offset: int) -> None:
        """Set the offset of the next read, relative to the start."""
        self._at = offset


class S3Upload:
    """See Upload. PutObject and multipart uploads both create the object with If-None-Match.

    If the response to a successful creation is lost, the next try fails because our own object
    exists. The object's metadata then identifies the object as ours. Commits also contain their
    writer's write id, because another process may try to write the same commit.
    """

    def __init__(
        self,
        client: S3Client,
        pool: Executor,
        key: str,
        full_key: str,
        part_size: int = PART,
    ) -> None:
        self._client = client
        self._pool = pool
        self._what = f"create {key}"
        self._full_key = full_key
        self._part_size = part_size
        self._token = secrets.token_hex(8)
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._started = 0
        self._sending: deque[Future[CompletedPartTypeDef]] = deque()
        self._sent: list[CompletedPartTypeDef] = []
        self._stop = threading.Event()

    def write(self, data: bytes | memoryview) -> int:
        """See Upload.write."""
        view = memoryview(data).cast("B")
        sent = 0
        while sent < len(view):
            if len(self._buffer) == self._part_size:
                self._send()
            room = self._part_size - len(self._buffer)
            self._buffer += view[sent : sent + room]
            sent += room
        return len(view)

    def finish(self) -> None:
        """See Upload.finish."""
        try:
            if self._upload_id is None:
                self._put()
            else:
                self._send()
                while self._sending:
                    self._sent.append(self._sending.popleft().result())
                self._complete()
        except (ObjectExistsError, UploadGoneError) as error:
            self._require_ours(error)
        self._upload_id = None  # nothing to abort

    def begin(self) -> None:
        """Begin a multipart upload, unless one has begun; `finish` then completes it."""
        if self._upload_id is not None:
            return
        answer = self._client.call(
            self._what,
            "CreateMultipartUpload",
            lambda client: client.create_multipart_upload(
                Bucket=self._client.bucket,
                Key=self._full_key,
                ChecksumAlgorithm="CRC32",
                Metadata={_OWNER: self._token},
            ),
        )
        self._upload_id = answer["UploadId"]

    def _put(self) -> None:
        self._client.call(
            self._what,
            "PutObject",
            lambda client: client.put_object(
                Bucket=self._client.bucket,
                Key=self._full_key,
                Body=cast(bytes, _Body(self._buffer)),
                IfNoneMatch="*",
                Metadata={_OWNER: self._token},
            ),
        )

    def _send(self) -> None:
        """Send the buffer as a part as soon as fewer than IN_FLIGHT parts are being sent."""
        self.begin()
        if self._started == MAX_PARTS:
            raise StoreError(
                f"{self._what}: more than {MAX_PARTS * self._part_size >> 30} GiB ({MAX_PARTS} "
                "parts of a multipart upload); split the content into several objects"
            )
        while len(self._sending) >= IN_FLIGHT:
            self._sent.append(self._sending.popleft().result())
        self._started += 1
        part, self._buffer = self._buffer, bytearray()
        self._sending.append(self._pool.submit(self._send_part, self._started, part))

    def _send_part(self, number: int, part: bytearray) -> "CompletedPartTypeDef":
        # The checksum is computed once, from the caller's bytes. The server compares it with the
        # part, and with the checksum in CompleteMultipartUpload.
        checksum = base64.b64encode(zlib.crc32(part).to_bytes(4, "big")).decode()
        upload_id = self._upload_id
        assert upload_id is not None
        answer = self._client.call(
            self._what,
            f"UploadPart {number}",
            lambda client: client.upload_part(
                Bucket=self._client.bucket,
                Key=self._full_key,
                UploadId=upload_id,
                PartNumber=number,
                Body=cast(bytes, _Body(part)),
                ChecksumCRC32=checksum,
            ),
            self._stop,
        )
        return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumCRC32": checksum}

    def _complete(self) -> None:
        upload_id = self._upload_id
        assert upload_id is not None
        self._client.call(
            self._what,
            "CompleteMultipartUpload",
            lambda client: client.complete_multipart_upload(
                Bucket=self._client.bucket,
                Key=self._full_key,
                UploadId=upload_id,
                MultipartUpload={"Parts": self._sent},
                IfNoneMatch="*",
            ),
        )

    def _require_ours(self, error: StoreError) -> None:
        """Raise `error` or ObjectExistsError unless the existing object is ours."""
        try:
            found = self._client.call(
                self._what,
                "HeadObject",
                lambda client: client.head_object(Bucket=self._client.bucket, Key=self._full_key),
            )
        except ObjectMissingError:
            raise error from None
        if found["Metadata"].get(_OWNER) == self._token:
            return
        if isinstance(error, ObjectExistsError):
            raise error
        raise ObjectExistsError(f"{self._what}: the object already exists") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        upload_id = self._upload_id
        if upload_id is None:
            return
        self._stop.set()
        for future in self._sending:
            future.cancel()
        wait(self._sending)  # parts that arrive after the abort would remain
        try:
            self._client.call(
                self._what,
                "AbortMultipartUpload",
                lambda client: client.abort_multipart_upload(
                    Bucket=self._client.bucket, Key=self._full_key, UploadId=upload_id
                ),
                self._stop,
            )
        except StoreError as failure:
            log.warning("%s; `retrace traces sweep` can remove the unfinished upload", failure)
