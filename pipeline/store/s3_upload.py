"""The upload of data objects to S3. Those of more than a part go by boto3's managed transfer."""

from io import BytesIO
from pathlib import Path
from queue import Full, Queue
from types import TracebackType
from typing import IO, TYPE_CHECKING, Self, cast

from boto3.s3.transfer import TransferConfig, create_transfer_manager

from pipeline.store.base import StoreError
from pipeline.store.s3_client import S3Client
from pipeline.store.s3_errors import UploadGoneError

if TYPE_CHECKING:
    from s3transfer.futures import TransferFuture
    from s3transfer.manager import TransferManager

PART = 8 << 20
"""Size of a part in bytes, and the maximum size of an object that is sent in one request."""
_IN_FLIGHT = 4
"""Maximum number of parts sent in parallel. An upload takes less than 96 MiB of memory."""
_POLL_S = 0.1

_CONFIG = TransferConfig(
    multipart_threshold=PART,
    multipart_chunksize=PART,
    max_concurrency=_IN_FLIGHT,
    preferred_transfer_client="classic",  # which sends its requests through S3Client's client
)
_CONFIG.max_in_memory_upload_chunks = _IN_FLIGHT


def upload_file(client: S3Client, key: str, full_key: str, path: Path) -> None:
    """Upload a local file; see Store.upload_file.

    Args:
        client: Client of the bucket.
        key: Key in the store, for messages.
        full_key: Key in the bucket.
        path: The local file.
    """
    what = f"create {key}"
    try:
        size = path.stat().st_size
        with client.requests(what) as s3, create_transfer_manager(s3, _CONFIG) as manager:
            transfer = manager.upload(str(path), client.bucket, full_key)
            _finish(client, what, full_key, size, transfer)
    except OSError as error:
        raise StoreError(f"{what}: {error}") from error


class S3Upload:
    """See Upload."""

    def __init__(self, client: S3Client, key: str, full_key: str) -> None:
        self._client = client
        self._what = f"create {key}"
        self._full_key = full_key
        self._size = 0
        self._buffer = bytearray()
        self._parts = _Parts()
        self._manager: TransferManager | None = None
        self._transfer: TransferFuture | None = None

    def write(self, data: bytes | memoryview) -> int:
        """See Upload.write."""
        view, at = memoryview(data).cast("B"), 0
        while at < len(view):
            if len(self._buffer) == PART:
                self._send()
            piece = view[at : at + PART - len(self._buffer)]
            self._buffer += piece
            at += len(piece)
        self._size += at
        return at

    def finish(self) -> None:
        """See Upload.finish."""
        if self._transfer is None:
            with self._client.requests(self._what) as s3:
                body = BytesIO(self._buffer)  # is sent in pieces, each with its own time limit
                s3.put_object(Bucket=self._client.bucket, Key=self._full_key, Body=body)
            return
        self._send()
        self._put(b"", self._transfer)
        _finish(self._client, self._what, self._full_key, self._size, self._transfer)

    def _send(self) -> None:
        if self._transfer is None:
            with self._client.requests(self._what) as s3:
                self._manager = create_transfer_manager(s3, _CONFIG)
            source = cast(IO[bytes], self._parts)
            self._transfer = self._manager.upload(source, self._client.bucket, self._full_key)
        part, self._buffer = bytes(self._buffer), bytearray()
        self._put(part, self._transfer)

    def _put(self, part: bytes, transfer: "TransferFuture") -> None:
        """Pass a part to the transfer as soon as there is room. Raises the transfer's error."""
        while not self._parts.put(part):
            if transfer.done():
                self._parts.leave()
                with self._client.requests(self._what):
                    transfer.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._parts.leave()
        if self._manager is not None and self._transfer is not None:
            self._transfer.cancel()  # aborts the transfer, unless it has ended
            self._manager.shutdown()

    def __del__(self) -> None:
        self._parts.leave()  # the transfer's thread must not wait forever


class _Parts:
    """A file object that boto3's thread reads while the caller writes; one part waits in it.

    With _CONFIG, boto3 reads PART bytes at a time, so each read returns one part.
    """

    def __init__(self) -> None:
        self._queue: Queue[bytes] = Queue(1)
        self._left = False

    def put(self, part: bytes) -> bool:
        """Append a part. Returns False if the previous part still waits after _POLL_S."""
        try:
            self._queue.put(part, timeout=_POLL_S)
        except Full:
            return False
        return True

    def leave(self) -> None:
        """Make all reads fail, so that boto3 aborts the upload."""
        self._left = True
        try:
            self._queue.put_nowait(b"")
        except Full:
            return  # the part that waits wakes the reader

    def read(self, size: int = -1) -> bytes:
        """Return the next part; the last one is empty."""
        part = self._queue.get()
        if self._left:
            raise StoreError("the upload was left before its end")
        return part


def _finish(
    client: S3Client, what: str, full_key: str, size: int, transfer: "TransferFuture"
) -> None:
    try:
        with client.requests(what):
            transfer.result()
    except UploadGoneError:
        # The upload is complete if the response to an earlier try of completing it was lost.
        found = client.head(what, full_key)
        if found is None or found["ContentLength"] != size:
            raise
