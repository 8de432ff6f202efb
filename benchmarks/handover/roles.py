"""Roles of the two processes in a hand-over, in Retrace's format and in other frameworks'."""

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
"""Number of shards written in parallel: one waits for the disk or network while another is
encoded."""
JOINED = 8
"""Number of recorded samples of 512 rows that are joined into one sample of the hand-over."""


class Rollout:
    """Role of the rollout process, which has the routes and sends them."""

    def generate(self, tokens: int, layers: int, shards: int) -> list[str]:
        """Prepare routes in samples of 4,096 rows.

        Args:
            tokens: Minimum number of tokens.
            layers: Number of layers.
            shards: Number of Retrace's shards.

        Returns:
            Digests of the samples' expert sets.
        """
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
        """Return the sample ids of each shard, as a step's plan lists them."""
        return [[sample.id for sample in shard] for shard in self._shards]

    def write(self, uri: str, compression: Compression) -> int:
        """Write and commit Retrace's shards, WRITERS at a time; return the total size in bytes."""
        store, geometry = open_store(uri), ours.geometry_of(self._recording)

        def write(number: int) -> int:
            written = ours.write(store, self._shards[number], geometry, number, compression)
            return sum(written.values())

        with ThreadPoolExecutor(WRITERS) as threads:
            return sum(threads.map(write, range(len(self._shards))))

    def serve(self, name: str, address: str) -> tuple[int, int, tuple[int, int]]:
        """Listen for connections from the trainer, which then receives a peer's pieces.

        Returns the port, the number of pieces and (L, K).
        """
        self._peer = peer_of(name)
        self._sent: list[int] = []  # size of each piece; several threads append
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
        """Send all pieces, optionally through shared memory; do nothing if the medium is HTTP."""
        if self._peer.medium == "http":
            return
        pieces = map(self._encoded, range(self._peer.pieces_of(self._recording)))
        connection, _ = self._listener.accept()
        with connection:
            wire.send_pieces(connection, pieces, shared)

    def close(self) -> int:
        """Stop listening and return the number of bytes that were sent."""
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
    """Role of the trainer's process, which receives routes as arrays."""

    def __init__(self) -> None:
        self._arrays: list[npt.NDArray[Any]] = []

    def digests(self) -> list[str]:
        """Return digests of the most recently received sets."""
        return set_digests(self._arrays)

    def forget(self) -> None:
        """Release the most recently received arrays."""
        self._arrays = []

    def read(self, uri: str, ids: Sequence[Sequence[str]]) -> None:
        """Fetch Retrace's committed shards, seal the step, and compare the shards with the seal."""
        found = ours.read_ahead(open_store(uri), ids)
        self._arrays = [found[id] for of_shard in ids for id in of_shard]

    def receive(
        self, name: str, address: str, port: int, pieces: int, shape_LK: tuple[int, int]
    ) -> None:
        """Receive and decode the pieces of a peer's format.

        Args:
            name: Name of the format.
            address: Address of the rollout process.
            port: Port of the rollout process.
            pieces: Number of pieces.
            shape_LK: Layers and experts per token.
        """
        peer = peer_of(name)
        receive = wire.over_http if peer.medium == "http" else wire.over_tcp
        found = receive(address, port, pieces, lambda piece: peer.decode(piece, shape_LK))
        self._arrays = [array for arrays in found for array in arrays]
