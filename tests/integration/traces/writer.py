"""A process that writes a shard, and can kill itself at a chosen point.

    python -m tests.integration.traces.writer URI SHARD SEED KILL_AT

A point is before or after an action whose effect outlives the process. On files, such actions are
the creation of a temporary file, the write of each 4 MiB, fsync, link and unlink; on S3, they are
the requests. Points are counted from 0. With KILL_AT -1, the process is not killed. A process that
reaches its end prints the number of points, and whether its commit became the shard's commit.
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.run.commit import new_write_id
from pipeline.store import Store, open_store
from pipeline.traces import Geometry, Routes, Sample, write_shard
from tests.samples import R3, make_samples

GEOMETRY = Geometry(experts=256, topk=8, layers=tuple(range(24)))
LONG = 24_000
_PIECE = 4 << 20


class Points:
    """Count the points that were passed, and kill the process at one of them."""

    def __init__(self, kill_at: int) -> None:
        self._kill_at = kill_at
        self.passed = 0

    def reach(self) -> None:
        if self.passed == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed += 1

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with a point before it and one after it."""

        def called(*arguments: Any, **options: Any) -> Any:
            self.reach()
            result = function(*arguments, **options)
            self.reach()
            return result

        return called


def watch(store: Store, points: Points) -> None:
    """Put points before and after the actions that change a store's objects."""
    if store.uri.startswith("s3:"):
        from botocore.httpsession import URLLib3Session

        URLLib3Session.send = points.around(URLLib3Session.send)
        return
    os.fsync, os.link = points.around(os.fsync), points.around(os.link)
    Path.unlink = points.around(Path.unlink)
    upload = store.upload("watched/object")
    kind = type(upload)
    with upload:
        pass  # the upload only provides its class
    kind.__init__ = points.around(kind.__init__)
    write, written = kind.write, 0

    def counted(self: Any, data: Any) -> int:
        nonlocal written
        if (written + len(data)) // _PIECE > written // _PIECE:
            points.reach()
        written += len(data)
        return write(self, data)

    kind.write = counted


def samples_of(shard: int, seed: int, G: int = LONG) -> list[Sample]:
    """Return two groups of two samples.

    Args:
        shard: The samples' shard: 0 or 1.
        seed: The seed for their contents.
        G: The length of each response in tokens. By default, the routes need several parts of a
            multipart upload.
    """
    rng = np.random.default_rng(seed)
    found = []
    for sample in make_samples(prompts=4, geometry=GEOMETRY):
        if int(sample.prompt_id) % 2 != shard:
            continue
        rows = len(sample.prompt_tokens_P) + G - 1
        # A fast way to draw random sets: a random first id and random gaps.
        gaps = rng.integers(1, 32, (rows, len(GEOMETRY.layers), GEOMETRY.topk), np.uint8)
        routes = Routes(np.cumsum(gaps, axis=2, dtype=np.uint8), np.ones(rows, np.bool_))
        found.append(
            replace(
                sample,
                response_tokens_G=rng.integers(0, 100, G).astype(np.uint32),
                loss_mask_G=np.ones(G, np.bool_),
                logprobs_G=-rng.random(G).astype(np.float32),
                version_spans=(replace(sample.version_spans[0], end=G),),
                routes=routes,
            )
        )
    return found


def main(uri: str, shard: int, seed: int, kill_at: int) -> None:
    """Write the shard, and print the number of points and whether the commit became the shard's.

    Args:
        uri: The store's URI.
        shard: The shard: 0 or 1.
        seed: The seed for its samples.
        kill_at: The point at which the process kills itself; -1 for never.
    """
    store = open_store(uri)
    samples = samples_of(shard, seed)
    points = Points(kill_at)
    watch(store, points)
    committed = write_shard(store, 0, shard, new_write_id(), samples, GEOMETRY, R3)
    sys.stdout.write(f"{points.passed} {committed.ours}\n")


if __name__ == "__main__":
    main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
