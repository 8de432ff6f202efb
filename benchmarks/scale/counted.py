"""An s3:// store that counts its requests per simulated second and charges their time."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.scale.clock import Clock
from pipeline.store import Store
from pipeline.store.s3 import S3Store

KINDS = {"HeadObject": "HEAD", "GetObject": "GET", "ListObjectsV2": "LIST", "PutObject": "PUT"}
"""Kinds of requests. S3 has one limit for HEAD and GET, and another for all other requests: PUTs,
LISTs, and the parts and completions of uploads."""


@dataclass
class Requests:
    """Request counts, keyed by simulated second, kind, folder of the run and kind of party."""

    counts: Counter[tuple[int, str, str, str]] = field(default_factory=Counter)

    def total(self, **wanted: str) -> int:
        """Return the number of requests that have all of the given values (kind, folder, party)."""
        return sum(n for place, n in self.counts.items() if _fits(place, wanted))

    def peak(self, **wanted: str) -> int:
        """Return the largest number of matching requests in one simulated second."""
        by_second: Counter[int] = Counter()
        for place, n in self.counts.items():
            if _fits(place, wanted):
                by_second[place[0]] += n
        return max(by_second.values(), default=0)


def _fits(place: tuple[int, str, str, str], wanted: Mapping[str, str]) -> bool:
    return all(
        dict(zip(("kind", "folder", "party"), place[1:], strict=True))[k] == v
        for k, v in wanted.items()
    )


def counted(
    uri: str, clock: Clock, latency_s: float, party: Callable[[], str]
) -> tuple[Store, Requests]:
    """Open a store whose requests are sent, counted, and charged to the clock.

    Args:
        uri: s3:// URI of the store.
        clock: Clock of the simulation.
        latency_s: Assumed duration of a request in seconds.
        party: Function that returns the kind of the running party.

    Returns:
        The store and the counts of its requests.
    """
    store, found, lock = S3Store(uri), Requests(), threading.Lock()
    root = store.uri.partition("://")[2].partition("/")[2]

    def count(params: Mapping[str, Any], model: Any, **_: object) -> None:
        key = str(params.get("Key", params.get("Prefix", "")))
        folder = key.removeprefix(f"{root}/").split("/")[0]
        with lock:
            found.counts[int(clock.now), KINDS.get(model.name, "PUT"), folder, party()] += 1

    with store._client.requests("count requests") as s3:
        s3.meta.events.register("before-parameter-build.s3", count)
        s3.meta.events.register("after-call.s3", lambda **_: clock.sleep(latency_s))
    return store, found
