"""Transport for other frameworks' pieces: HTTP, or one connection, optionally with shared memory.

In both transports, work overlaps: while a piece is sent, the next one is encoded and the previous
one is decoded.
"""

import http.client
import http.server
import queue
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

CONNECTIONS = 2
"""Number of parallel HTTP connections. With more, threads would only compete for Python's lock."""
SHARED = Path("/dev/shm")

Decoded = TypeVar("Decoded")


def http_server(address: str, encoded: Callable[[int], bytes]) -> http.server.ThreadingHTTPServer:
    """Return a server that answers `GET /<number>` with that piece, one thread per connection."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body = encoded(int(self.path[1:]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    return http.server.ThreadingHTTPServer((address, 0), Handler)


def over_http(
    address: str, port: int, pieces: int, decode: Callable[[bytes], Decoded]
) -> list[Decoded]:
    """Fetch and decode all pieces; each thread has a separate connection.

    Args:
        address: Address of the server.
        port: Port of the server.
        pieces: Number of pieces.
        decode: Decoder of one piece.

    Returns:
        The decoded pieces in order.
    """
    numbers = iter(range(pieces))

    def fetch() -> dict[int, Decoded]:
        connection = http.client.HTTPConnection(address, port)
        found = {}
        for number in numbers:  # all threads share the iterator, so each number is used once
            connection.request("GET", f"/{number}")
            found[number] = decode(connection.getresponse().read())
        connection.close()
        return found

    with ThreadPoolExecutor(CONNECTIONS) as threads:
        fetching = [threads.submit(fetch) for _ in range(CONNECTIONS)]
        found = {i: piece for thread in fetching for i, piece in thread.result().items()}
    return [found[i] for i in range(pieces)]


def send_pieces(connection: socket.socket, pieces: Iterable[bytes], shared: bool) -> None:
    """Send pieces over a connection.

    Args:
        connection: Connection to the trainer's process.
        pieces: Pieces in order.
        shared: Whether to put the pieces into shared memory and to send only their paths.
    """
    pending: Future[None] | None = None
    with ThreadPoolExecutor(1) as sender:
        for number, piece in enumerate(pieces):
            if shared:
                path = SHARED / f"retrace-bench-{connection.getsockname()[1]}-{number}"
                path.write_bytes(piece)
                piece = str(path).encode()
            if pending is not None:
                pending.result()
            pending = sender.submit(_send, connection, piece)
        if pending is not None:
            pending.result()


def over_tcp(
    address: str, port: int, pieces: int, decode: Callable[[bytes], Decoded]
) -> list[Decoded]:
    """Receive and decode the pieces that `send_pieces` sends.

    Args:
        address: Address of the sender.
        port: Port of the sender.
        pieces: Number of pieces.
        decode: Decoder of one piece.

    Returns:
        The decoded pieces in order.

    Raises:
        EOFError: The connection ended before the last piece.
    """
    arrived: queue.Queue[bytes | bytearray | None] = queue.Queue(1)

    def fetch() -> None:
        try:
            for _ in range(pieces):
                arrived.put(_receive(connection))
        finally:
            arrived.put(None)

    found = []
    with socket.create_connection((address, port)) as connection, ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(fetch)
        while (piece := arrived.get()) is not None:
            found.append(decode(piece))
        fetching.result()
    return found


def _send(connection: socket.socket, piece: bytes) -> None:
    connection.sendall(len(piece).to_bytes(8, "little"))
    connection.sendall(piece)


def _receive(connection: socket.socket) -> bytes | bytearray:
    piece: bytes | bytearray = _exactly(
        connection, int.from_bytes(_exactly(connection, 8), "little")
    )
    if piece.startswith(bytes(SHARED)):
        path = Path(piece.decode())
        piece = path.read_bytes()
        path.unlink()
    return piece


def _exactly(connection: socket.socket, size: int) -> bytearray:
    piece = bytearray(size)
    view = memoryview(piece)
    while view:
        got = connection.recv_into(view)
        if not got:
            raise EOFError(f"the connection ended {len(view)} bytes too early")
        view = view[got:]
    return piece
