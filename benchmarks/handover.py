"""From the rollout process to arrays in the trainer's: a second process receives, really.

The clock runs from the moment when the rollout process holds the routes of all samples as arrays
until the trainer process holds them as arrays and has said so. Both processes have started and
imported what they need before that.

    Retrace        write_shard and commit; the trainer seals, opens the manifest, reads, checks all
    http           the trainer GETs each sample from the rollout process over one connection on
                   localhost; the response is encoded when it is asked for
    shared memory  one file in /dev/shm: what Ray's object store is
    file           one file beside our store, not synced to the disk (ours is)
"""

import hashlib
import http.client
import http.server
import multiprocessing
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import ours
from benchmarks.peers import PEERS, Peer
from benchmarks.recordings import Recording
from pipeline.store import open_store


def set_digests(arrays: Sequence[npt.NDArray[Any]]) -> list[str]:
    """One digest per sample of its sets; neither the order of ids nor their type matters."""
    return [
        hashlib.sha256(np.sort(array, axis=-1).astype("<u2", order="C").tobytes()).hexdigest()
        for array in arrays
    ]


@dataclass(frozen=True)
class Trainer:
    """The second process."""

    pipe: Connection

    def receive(self, how: str, *arguments: Any) -> None:
        """Have it receive; returns when it holds the arrays."""
        self.pipe.send((how, arguments))
        self.pipe.recv()

    def digests(self) -> list[str]:
        """Of what it received last."""
        self.pipe.send(("digests", ()))
        found: list[str] = self.pipe.recv()
        return found


@contextmanager
def trainer() -> Iterator[Trainer]:
    """Start the trainer process, wait until it is ready, and end it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_trainer, args=(there,), daemon=True)
    process.start()
    there.close()
    here.recv()
    try:
        yield Trainer(here)
    finally:
        here.close()
        process.join()


def of_peer(peer: Peer, recording: Recording, receiver: Trainer, folder: Path) -> float:
    """Seconds of one hand-over in a peer's way."""
    shape_LK = (recording.layers, recording.topk)
    number = PEERS.index(peer)
    if peer.medium == "http":
        with _serving(peer, recording) as port:
            started = time.perf_counter()
            receiver.receive("http", number, port, len(recording.routes), shape_LK)
            return time.perf_counter() - started
    place = Path("/dev/shm") if peer.medium == "shared memory" else folder
    with TemporaryDirectory(dir=place) as scratch:
        path = Path(scratch, "routes")
        started = time.perf_counter()
        path.write_bytes(peer.encode(recording, 0))
        receiver.receive("file", number, str(path), shape_LK)
        return time.perf_counter() - started


def of_ours(recording: Recording, receiver: Trainer, folder: Path) -> float:
    """Seconds of one hand-over through a file:// store."""
    samples, geometry = ours.samples_of(recording), ours.geometry_of(recording)
    with TemporaryDirectory(dir=folder) as scratch:
        store = open_store(scratch)
        started = time.perf_counter()
        ours.write(store, samples, geometry)
        receiver.receive("store", store.uri, [sample.id for sample in samples])
        return time.perf_counter() - started


def _trainer(pipe: Connection) -> None:
    pipe.send("ready")
    arrays: list[npt.NDArray[Any]] = []
    while True:
        try:
            how, arguments = pipe.recv()
        except EOFError:
            return
        if how == "digests":
            pipe.send(set_digests(arrays))
            continue
        arrays = {"http": _over_http, "file": _from_file, "store": _from_store}[how](*arguments)
        pipe.send("done")


def _over_http(
    number: int, port: int, samples: int, shape_LK: tuple[int, int]
) -> list[npt.NDArray[Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    arrays = []
    for sample in range(samples):
        connection.request("GET", f"/{sample}")
        arrays += PEERS[number].decode(connection.getresponse().read(), shape_LK)
    connection.close()
    return arrays


def _from_file(number: int, path: str, shape_LK: tuple[int, int]) -> list[npt.NDArray[Any]]:
    return PEERS[number].decode(Path(path).read_bytes(), shape_LK)


def _from_store(uri: str, ids: Sequence[str]) -> list[npt.NDArray[Any]]:
    return ours.seal_and_read(open_store(uri), ids)


@contextmanager
def _serving(peer: Peer, recording: Recording) -> Iterator[int]:
    """The rollout process's server; its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body = peer.encode(recording, int(self.path[1:]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
