"""The upload of data objects to S3 by boto3's managed transfer."""

from queue import Full, Queue
from typing import IO, cast

from boto3.s3.transfer import TransferConfig, create_transfer_manager

from pipeline.store.base import StoreError, Upload
from pipeline.store.s3_client import S3Client
from pipeline.store.s3_errors import UploadGoneError

PART = 8 << 20
"""Size of a part in bytes. A smaller object is sent in one request."""
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


class S3Upload(Upload):
    """See Upload. boto3's threads read the parts while the caller writes the next one."""

    def __init__(self, client: S3Client, what: str, full_key: str) -> None:
        self._client = client
        self._what = what
        self._full_key = full_key
        self._size = 0
        self._buffer = bytearray()
        self._parts = _Parts()
        with client.requests(what) as s3:
            self._manager = create_transfer_manager(s3, _CONFIG)
        source = cast(IO[bytes], self._parts)
        self._transfer = self._manager.upload(source, client.bucket, full_key)

    def write(self, data: bytes | memoryview) -> int:
        """See Upload.write."""
        view, at = memoryview(data).cast("B"), 0
        while at < len(view):
            piece = view[at : at + PART - len(self._buffer)]
            self._buffer += piece
            at += len(piece)
            if len(self._buffer) == PART:
                self._send()
        self._size += at
        return at

    def finish(self) -> None:
        """See Upload.finish."""
        if self._buffer:
            self._send()
        self._send()  # an empty part is the end
        try:
            with self._client.requests(self._what):
                self._transfer.result()
        except UploadGoneError:
            # The upload is complete if the response to an earlier try of completing it was lost.
            found = self._client.head(self._what, self._full_key)
            if found is None or found["ContentLength"] != self._size:
                raise

    def _send(self) -> None:
        """Pass the buffer to the transfer as soon as there is room. Raises the transfer's error."""
        part, self._buffer = bytes(self._buffer), bytearray()
        while not self._parts.put(part):
            if self._transfer.done():
                with self._client.requests(self._what):
                    self._transfer.result()

    def leave(self) -> None:
        """See Upload.leave."""
        self._parts.leave()
        self._transfer.cancel()  # aborts the transfer, unless it has ended
        self._manager.shutdown()

    def __del__(self) -> None:
        self._parts.leave()  # the transfer's thread must not wait forever


class _Parts:
    """A file object that boto3's threads read; each read returns one part, of which one waits."""

    def __init__(self) -> None:
        self._queue: Queue[bytes] = Queue(1)
        self._ended = False
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
        """Return the next part, which has `size` bytes unless it is the last one.

        After the last part, every read returns an empty one.
        """
        part = b"" if self._ended else self._queue.get()
        if self._left:
            raise StoreError("the upload was left before its end")
        self._ended = not part
        return part
