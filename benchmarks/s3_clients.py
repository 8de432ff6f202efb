"""Four clients that read and write the same objects in S3, for benchmarks/store.py."""

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import boto3
import pyarrow.fs

from pipeline.store import open_store
from pipeline.store.s3_ranges import PIECE, spans

__all__ = ["PIECE", "SMALL", "SMALL_COUNT", "Client", "clients"]

SMALL = 4096
SMALL_COUNT = 200


class Client(Protocol):
    """An S3 client; each method prepares an operation and returns a function to be timed."""

    def ranges(self, ranges: list[tuple[int, int]]) -> Callable[[], list[bytes]]: ...
    def whole(self, pieces: list[tuple[int, int]]) -> Callable[[], Any]: ...
    def write(self, data: bytes) -> Callable[[], Any]: ...
    def puts(self) -> Callable[[], Any]: ...
    def gets(self) -> Callable[[], Any]: ...


def clients(uri: str) -> dict[str, Client]:
    """Return the installed clients, keyed by name; the plain one is first."""
    found: dict[str, Client] = {
        "plain": Plain(uri),
        "ours (boto3)": Ours(uri),
        "pyarrow": Arrow(uri),
    }
    if importlib.util.find_spec("obstore"):
        found["obstore"] = Obstore(uri)
    return found


class Plain:
    """boto3 with its defaults, sending one request at a time."""

    def __init__(self, uri: str) -> None:
        self.bucket, _, self.prefix = uri.removeprefix("s3://").partition("/")
        self.client = boto3.client("s3")

    def get(self, key: str, offset: int, length: int) -> bytes:
        answer = self.client.get_object(
            Bucket=self.bucket,
            Key=f"{self.prefix}/{key}",
            Range=f"bytes={offset}-{offset + length - 1}",
        )
        return answer["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"{self.prefix}/{key}", Body=data)

    def ranges(self, ranges: list[tuple[int, int]]) -> Callable[[], list[bytes]]:
        return lambda: [self.get("large", *one) for one in ranges]

    def whole(self, pieces: list[tuple[int, int]]) -> Callable[[], Any]:
        return lambda: b"".join([self.get("large", *one) for one in pieces])

    def write(self, data: bytes) -> Callable[[], Any]:
        def upload() -> None:
            place = {"Bucket": self.bucket, "Key": f"{self.prefix}/write-plain"}
            part = PIECE
            upload_id = self.client.create_multipart_upload(**place)["UploadId"]
            parts = []
            for number, start in enumerate(range(0, len(data), part), 1):
                answer = self.client.upload_part(
                    **place,
                    UploadId=upload_id,
                    PartNumber=number,
                    Body=data[start : start + part],
                )
                parts.append({"PartNumber": number, "ETag": answer["ETag"]})
            self.client.complete_multipart_upload(
                **place, UploadId=upload_id, MultipartUpload={"Parts": parts}
            )

        return upload

    def puts(self) -> Callable[[], Any]:
        return lambda: [self.put(f"small/{i}", bytes(SMALL)) for i in range(SMALL_COUNT)]

    def gets(self) -> Callable[[], Any]:
        return lambda: [self.get(f"small/{i}", 0, SMALL) for i in range(SMALL_COUNT)]


class Ours:
    """The client of pipeline.store, as readers and writers of traces use it."""

    def __init__(self, uri: str) -> None:
        self.store = open_store(uri)
        self.names = iter(range(1_000_000))

    def ranges(self, ranges: list[tuple[int, int]]) -> Callable[[], list[bytes]]:
        return lambda: self.store.read_ranges("large", ranges)

    def whole(self, pieces: list[tuple[int, int]]) -> Callable[[], Any]:
        return lambda: self.store.read("large")

    def write(self, data: bytes) -> Callable[[], Any]:
        def upload() -> None:
            with self.store.upload(f"write-ours-{next(self.names)}") as upload:
                upload.write(data)
                upload.finish()

        return upload

    def puts(self) -> Callable[[], Any]:
        def create() -> None:
            for _ in range(SMALL_COUNT):
                self.store.create(f"small-ours/{next(self.names)}", bytes(SMALL))

        return create

    def gets(self) -> Callable[[], Any]:
        return lambda: [self.store.read(f"small/{i}") for i in range(SMALL_COUNT)]


class Arrow:
    """pyarrow's S3FileSystem; this class merges ranges and reads them in 8 threads."""

    def __init__(self, uri: str) -> None:
        self.place = uri.removeprefix("s3://")
        url = os.environ.get("AWS_ENDPOINT_URL_S3", "")
        scheme, _, host = url.partition("://")
        self.fs = pyarrow.fs.S3FileSystem(
            endpoint_override=host or None,
            scheme=scheme or "https",
            region=os.environ.get("AWS_REGION"),
        )
        self.pool = ThreadPoolExecutor(8)

    def ranges(self, ranges: list[tuple[int, int]]) -> Callable[[], list[bytes]]:
        def read() -> list[bytes]:
            with self.fs.open_input_file(f"{self.place}/large") as file:
                return list(self.pool.map(lambda span: file.read_at(span[1], span[0]), merged))

        merged = [(span.offset, span.end - span.offset) for span in spans(ranges)]
        return read

    def whole(self, pieces: list[tuple[int, int]]) -> Callable[[], Any]:
        return lambda: b"".join(self.ranges(pieces)())

    def write(self, data: bytes) -> Callable[[], Any]:
        def write() -> None:
            with self.fs.open_output_stream(f"{self.place}/write-arrow") as stream:
                for start in range(0, len(data), PIECE):
                    stream.write(data[start : start + (PIECE)])

        return write

    def puts(self) -> Callable[[], Any]:
        def put() -> None:
            for i in range(SMALL_COUNT):
                with self.fs.open_output_stream(f"{self.place}/small-arrow/{i}") as stream:
                    stream.write(bytes(SMALL))

        return put

    def gets(self) -> Callable[[], Any]:
        def get() -> None:
            for i in range(SMALL_COUNT):
                with self.fs.open_input_file(f"{self.place}/small/{i}") as file:
                    file.read()

        return get


class Obstore:
    """obstore (Rust's object_store), if it is installed."""

    def __init__(self, uri: str) -> None:
        import obstore
        from obstore.store import S3Store

        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        url = os.environ.get("AWS_ENDPOINT_URL_S3")
        self.obstore = obstore
        self.store = S3Store(
            bucket,
            prefix=prefix,
            endpoint=url,
            region=os.environ.get("AWS_REGION"),
            client_options={"allow_http": True},
        )

    def ranges(self, ranges: list[tuple[int, int]]) -> Callable[[], list[bytes]]:
        starts, lengths = [a for a, _ in ranges], [n for _, n in ranges]
        return lambda: [
            bytes(part)
            for part in self.obstore.get_ranges(self.store, "large", starts=starts, lengths=lengths)
        ]

    def whole(self, pieces: list[tuple[int, int]]) -> Callable[[], Any]:
        return lambda: b"".join(self.ranges(pieces)())

    def write(self, data: bytes) -> Callable[[], Any]:
        return lambda: self.obstore.put(
            self.store, "write-obstore", data, chunk_size=PIECE, max_concurrency=4
        )

    def puts(self) -> Callable[[], Any]:
        return lambda: [
            self.obstore.put(self.store, f"small-obstore/{i}", bytes(SMALL))
            for i in range(SMALL_COUNT)
        ]

    def gets(self) -> Callable[[], Any]:
        return lambda: [
            bytes(self.obstore.get(self.store, f"small/{i}").bytes()) for i in range(SMALL_COUNT)
        ]
