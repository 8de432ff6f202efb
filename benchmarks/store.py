"""The s3:// store's data path: boto3 (ours), pyarrow and obstore against plain GETs, in one run.

    python -m benchmarks.store [--megabytes 256] [--rounds 5]

Starts `minio` (on PATH) on a temporary folder, or takes the server and bucket that --uri names
with AWS's own variables. Every way of reading is timed in turn, several rounds, and the medians are
compared: the numbers depend on the machine, the ratios less.

The slice pattern is a training rank's: of a routes file with 48 column chunks of 75 kB in each row
group, it reads the 24 neighbouring chunks of its pipeline stage, of every row group.
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
    parser.add_argument("--uri", help="s3://BUCKET/PREFIX to use instead of a MinIO of our own")
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
    """The block of the page."""
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
        # Plain GETs are given the merged ranges: the same bytes in the same requests.
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
        f"{size >> 20} MiB, a slice of {sliced >> 20} MiB in {len(ranges)} ranges = {len(wanted)} "
        f"merged ones; medians of {rounds} rounds, cores shared with the server. plain: boto3 "
        "get_object, put_object, upload_part, one request after the other; above 1: faster."
    )
    return block(
        table, how, machine(*filter(importlib.util.find_spec, ("boto3", "pyarrow", "obstore")))
    )


def row(count: int, ways: dict[str, Callable[[], Any]], rounds: int, small: bool) -> Iterator[str]:
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():  # in turn: what disturbs the machine disturbs all
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
