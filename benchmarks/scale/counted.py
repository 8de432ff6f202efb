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
    real = store._client.call

    def call(what: str, operation: str, *rest: Any, **named: Any) -> Any:
        kind = KINDS.get(operation.split()[0], "PUT")
        folder = what.rpartition(" ")[2].split("/")[0]
        with lock:
            found.counts[int(clock.now), kind, folder, party()] += 1
        try:
            return real(what, operation, *rest, **named)
        finally:
            clock.sleep(latency_s)

    store._client.call = call  # type: ignore[method-assign]
    return store, found
