"""Compare S3 clients on the store's data path: Retrace's (boto3), pyarrow, obstore, plain boto3.

    python -m benchmarks.store [--megabytes 256] [--rounds 5]

The program starts `minio` (on PATH) with a temporary folder, or uses the bucket of --uri on the
server to which AWS's environment variables point. The clients take turns for several rounds, and
their medians are compared. The ratios depend less on the machine than the times do.

The operation "slice" reads ranges as a training rank does. Each row group of the routes file has 48
column chunks of 75 kB. From every row group, the rank reads the 24 adjacent chunks of its pipeline
stage.
"""

import argparse
import contextlib
import importlib.util
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.measure import machine
from benchmarks.minio import own_minio
from benchmarks.page import Table, arguments_of, block, publish
from benchmarks.s3_clients import PIECE, SMALL, SMALL_COUNT, clients
from pipeline.store import open_store
from pipeline.store.s3_ranges import spans

CHUNK = 75_000
CHUNKS = 48
STAGE = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--uri", help="s3://BUCKET/PREFIX to use instead of a temporary MinIO")
    arguments = arguments_of(parser)
    size, rounds = (8, 1) if arguments.quick else (arguments.megabytes, arguments.rounds)
    with contextlib.ExitStack() as stack:
        uri = arguments.uri or stack.enter_context(own_minio()).uri
        uri = f"{uri.rstrip('/')}/benchmark-{secrets.token_hex(4)}"
        try:
            publish({"store": measure(uri, size << 20, rounds)}, arguments)
        finally:
            store = open_store(uri)
            for info in store.list(""):
                store.delete(info.key)


def measure(uri: str, size: int, rounds: int) -> str:
    """Measure all clients on a store and return the block of the page.

    Args:
        uri: URI of the store.
        size: Size of the large object in bytes.
        rounds: Number of rounds; the median counts.
    """
    store = open_store(uri)
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    store.create("large", data)
    group = CHUNK * CHUNKS
    ranges = [
        (start + CHUNK * i, CHUNK) for start in range(0, size - group, group) for i in range(STAGE)
    ]
    wanted = [(span.offset, span.end - span.offset) for span in spans(ranges)]
    pieces = [(a, min(PIECE, size - a)) for a in range(0, size, PIECE)]
    readers = clients(uri)
    sliced = sum(length for _, length in ranges)
    shown: list[tuple[str, int, dict[str, Callable[[], Any]]]] = [
        # Plain GETs fetch the merged ranges, so that bytes and requests are the same.
        (
            "slice",
            sliced,
            {n: r.ranges(wanted if n == "plain" else ranges) for n, r in readers.items()},
        ),
        ("whole object", size, {n: r.whole(pieces) for n, r in readers.items()}),
        ("multipart write", size, {n: r.write(data) for n, r in readers.items()}),
        ("200 puts of 4 kB", SMALL * SMALL_COUNT, {n: r.puts() for n, r in readers.items()}),
        ("200 gets of 4 kB", SMALL * SMALL_COUNT, {n: r.gets() for n, r in readers.items()}),
    ]
    for reader in readers.values():
        reader.puts()()
        got = b"".join(reader.ranges(ranges)())
        assert got == b"".join(data[a : a + n] for a, n in ranges), "wrong bytes"

    table = Table(
        ("", *(f"{name}{'' if name == 'plain' else ' / plain'}" for name in readers)),
        tuple((title, *row(count, ways, rounds, "4 kB" in title)) for title, count, ways in shown),
    )
    how = (
        f"{size >> 20} MiB, a slice of {sliced >> 20} MiB in {len(ranges)} ranges, "
        f"merged into {len(wanted)} requests; medians of {rounds} rounds, cores shared with the "
        "server. plain: boto3 get_object, put_object, upload_part, one request at a time. A ratio "
        "above 1 means faster than plain."
    )
    return block(
        table, how, machine(*filter(importlib.util.find_spec, ("boto3", "pyarrow", "obstore")))
    )


def row(count: int, ways: dict[str, Callable[[], Any]], rounds: int, small: bool) -> Iterator[str]:
    """Time the clients and yield the cells of a row.

    Args:
        count: Number of bytes that an operation transfers.
        ways: Operations, keyed by client.
        rounds: Number of rounds; the median counts.
        small: Whether the operation consists of SMALL_COUNT small requests.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():  # in turn, so that a disturbance affects all clients
            began = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    for name, median in medians.items():
        speed = (
            f"{median / SMALL_COUNT * 1e3:.2f} ms each"
            if small
            else f"{count / median / 1e6:.0f} MB/s"
        )
        yield speed if name == "plain" else f"{medians['plain'] / median:.2f} ({speed})"


if __name__ == "__main__":
    main()
