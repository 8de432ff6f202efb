"""What the two processes of a hand-over do, in Retrace's way and in those of peers."""

import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.handover import wire
from benchmarks.routes.recordings import Recording, recorded, set_digests, widened
from benchmarks.ways import ours
from benchmarks.ways.peers import peer_of
from pipeline.store import open_store
from pipeline.traces import Compression

WRITERS = 2
"""Shards that are written at once: one waits for the disk or network while another is coded."""
JOINED = 8
"""Recorded samples of 512 rows that are one of the hand-over's."""


class Rollout:
    """Has the routes and hands them out."""

    def generate(self, tokens: int, layers: int, shards: int) -> list[str]:
        """Have routes of so many tokens, in samples of 4,096 rows; digests of their sets."""
        wide = widened(recorded(), layers, tokens)
        starts = range(0, len(wide.routes), JOINED)
        routes = tuple(np.concatenate(wide.routes[i : i + JOINED]) for i in starts)
        prompts, groups = (len(routes[0]) // 4,) * len(routes), tuple(range(len(routes)))
        self._recording = Recording(wide.name, wide.experts, routes, prompts, groups)
        samples = ours.samples_of(self._recording)
        each = -(-len(samples) // shards)
        self._shards = [samples[i : i + each] for i in range(0, len(samples), each)]
        return set_digests(routes)

    def ids(self) -> list[list[str]]:
        """Sample ids by shard, as a step's plan names them."""
        return [[sample.id for sample in shard] for shard in self._shards]

    def write(self, uri: str, compression: Compression) -> int:
        """Retrace: write and commit the shards, some at a time; bytes of all data files."""
        store, geometry = open_store(uri), ours.geometry_of(self._recording)

        def write(number: int) -> int:
            written = ours.write(store, self._shards[number], geometry, number, compression)
            return sum(written.values())

        with ThreadPoolExecutor(WRITERS) as threads:
            return sum(threads.map(write, range(len(self._shards))))

    def serve(self, name: str, address: str) -> tuple[int, int, tuple[int, int]]:
        """Listen for a peer's trainer: (port, pieces, (L, K))."""
        self._peer = peer_of(name)
        self._sent: list[int] = []  # of pieces: several threads append
        if self._peer.medium == "http":
            self._server = wire.http_server(address, self._encoded)
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
            port = self._server.server_address[1]
        else:
            self._listener = socket.create_server((address, 0))
            port = self._listener.getsockname()[1]
        shape_LK = (self._recording.layers, self._recording.topk)
        return port, self._peer.pieces_of(self._recording), shape_LK

    def send(self, shared: bool) -> None:
        """Send all pieces, through shared memory or not. HTTP's threads need no one to begin."""
        if self._peer.medium == "http":
            return
        pieces = map(self._encoded, range(self._peer.pieces_of(self._recording)))
        connection, _ = self._listener.accept()
        with connection:
            wire.send_pieces(connection, pieces, shared)

    def close(self) -> int:
        """Stop listening; bytes that were sent."""
        if self._peer.medium == "http":
            self._server.shutdown()
            self._server.server_close()
        else:
            self._listener.close()
        return sum(self._sent)

    def _encoded(self, number: int) -> bytes:
        piece = self._peer.encode(self._recording, number)
        self._sent.append(len(piece))
        return piece


class Trainer:
    """Gets routes as arrays."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []

    def digests(self) -> list[str]:
        """Of what was received last."""
        return set_digests(self._arrays)

    def forget(self) -> None:
        """Let go of what was received last."""
        self._arrays = []

    def read(self, uri: str, ids: Sequence[Sequence[str]]) -> None:
        """Retrace: fetch each shard when its commit is there, seal the step, compare."""
        found = ours.read_ahead(open_store(uri), ids)
        self._arrays = [found[id] for of_shard in ids for id in of_shard]

    def receive(
        self, name: str, address: str, port: int, pieces: int, shape_LK: tuple[int, int]
    ) -> None:
        """A peer's way."""
        peer = peer_of(name)
        receive = wire.over_http if peer.medium == "http" else wire.over_tcp
        found = receive(address, port, pieces, lambda piece: peer.decode(piece, shape_LK))
        self._arrays = [array for arrays in found for array in arrays]
