"""Outages: a server that dies in the middle of a transfer and is started again after a while."""

import threading
import time
from collections.abc import Mapping
from typing import Protocol

from tests.proxy import Request

_LARGE = 1 << 20


class Server(Protocol):
    """A server that can be killed and started again, such as tests.minio.Minio."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Away:
    """A `change` for tests.proxy that kills the server at each transfer's first large request.

    If a transfer begins while the server is away, the outage lasts long enough for this transfer
    too. A single thread starts the server again, so the server never runs twice.
    """

    def __init__(self, server: Server, away_s: float, transfers: Mapping[str, tuple[str, str]]):
        """Prepare the outages.

        Args:
            server: The server to kill.
            away_s: Seconds until the server starts again.
            transfers: The method of each transfer's requests and a part of their path, keyed by the
                transfer's name.
        """
        self._server = server
        self._away_s = away_s
        self._transfers = dict(transfers)
        self._lock = threading.Lock()
        self._began_s: dict[str, float] = {}
        """While the server is away, the time, by time.monotonic(), at which each transfer's outage
        began; empty while the server runs."""
        self._starter: threading.Thread | None = None
        self.times_s: dict[str, float] = {}
        """Seconds for which the server was away, keyed by transfer; 0 until it runs again."""

    def __call__(self, request: Request) -> None:
        """Kill the server before it receives a transfer's first large request."""
        large = "range" in request.headers or len(request.body) > _LARGE
        with self._lock:
            for transfer, (method, place) in self._transfers.items():
                here = request.line.startswith(method) and place in request.line
                if here and large and transfer not in self.times_s:
                    self._begin(transfer)

    def close(self) -> None:
        """Wait until the server runs again, and begin no further outage."""
        with self._lock:
            self._transfers = {}
        if self._starter is not None:
            self._starter.join()

    def _begin(self, transfer: str) -> None:
        running = not self._began_s
        self.times_s[transfer] = 0.0
        if running:
            self._server.stop()
        self._began_s[transfer] = time.monotonic()
        if running:
            self._starter = threading.Thread(target=self._start_again, name="end of the outage")
            self._starter.start()

    def _start_again(self) -> None:
        """Start the server as soon as it has been away long enough for every transfer."""
        while True:
            with self._lock:
                left_s = max(self._began_s.values()) + self._away_s - time.monotonic()
                if left_s <= 0:
                    self._server.start()
                    for transfer, began_s in self._began_s.items():
                        self.times_s[transfer] = time.monotonic() - began_s
                    self._began_s = {}
                    return
            time.sleep(left_s)
