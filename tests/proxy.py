"""A TCP proxy that can lose a server's responses, change requests to it, and be slow.

The proxy parses only as much of HTTP/1.1 as it needs to find the end of a request. This is enough
because boto3 sends Content-Length, and only one request at a time on each connection.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.minio import Minio


@dataclass
class Request:
    """A request of the client. Header names are in lower case."""

    line: str
    headers: dict[str, str]
    body: bytes = b""

    def to_bytes(self) -> bytes:
        lines = [self.line, *(f"{name}: {value}" for name, value in self.headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


Change = Callable[[Request], None]
_AT_ONCE = 64 << 10
"""Number of bytes that pass through a slow proxy without a pause; also the size of the kernel's
buffer in front of the proxy."""


@dataclass
class Proxy:
    """A proxy that forwards requests to `port`."""

    port: int
    change: Change = lambda request: None
    """May edit each request before the proxy forwards it."""
    loses: Callable[[Request], bool] = lambda request: False
    """Returns whether the proxy drops the response to a request, with the connection."""
    lost: list[str] = field(default_factory=list)
    """The first lines of the requests whose responses were lost."""
    seen: list[str] = field(default_factory=list)
    """The first lines of all requests."""
    url: str = ""
    rate: float | None = None
    """Limit, in bytes per second, of all requests and responses together; None for no limit."""
    _free_s: float = 0.0
    """The time, by time.monotonic(), at which the connection is free again."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def passing(self, size: int) -> None:
        """Wait until `size` bytes have passed, after the bytes that arrived earlier."""
        if self.rate is None:
            return
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + size / self.rate
            free_s = self._free_s
        time.sleep(max(0.0, free_s - time.monotonic()))

    def serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(ConnectionError):
            reader = client.makefile("rb")
            while (request := _read_request(reader, client, self.passing)) is not None:
                self.seen.append(request.line)
                self.change(request)
                # Each request has a separate connection, because the server closes connections that
                # are idle while the proxy is slow.
                with socket.create_connection(("127.0.0.1", self.port)) as server:
                    server.sendall(request.to_bytes())
                    answers = server.makefile("rb")
                    answer = _read_answer(answers, head=request.line.startswith("HEAD"))
                if self.loses(request):
                    self.lost.append(request.line)
                    return
                for at in range(0, len(answer), _AT_ONCE):
                    self.passing(len(answer[at : at + _AT_ONCE]))
                    client.sendall(answer[at : at + _AT_ONCE])


def _headers(reader) -> tuple[str, dict[str, str]] | None:
    line = reader.readline().decode("latin-1").strip()
    if not line:
        return None
    headers = {}
    while text := reader.readline().decode("latin-1").strip():
        name, _, value = text.partition(":")
        headers[name.lower()] = value.strip()
    return line, headers


def _read_request(reader, client: socket.socket, passing: Callable[[int], None]) -> Request | None:
    found = _headers(reader)
    if found is None:
        return None
    line, headers = found
    if headers.pop("expect", "") == "100-continue":
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body, size = bytearray(), int(headers.get("content-length", 0))
    while len(body) < size:
        piece = reader.read(min(_AT_ONCE, size - len(body)))
        if not piece:
            return None  # the client has given up
        passing(len(piece))
        body += piece
    return Request(line, headers, bytes(body))


def _read_answer(answers, head: bool) -> bytes:
    found = _headers(answers)
    if found is None:
        raise ConnectionResetError("the server closed the connection")
    line, headers = found
    lines = [line, *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    if head:
        body = b""
    elif headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(_keep := answers.readline(), 16):
            body += _keep + answers.read(size + 2)
        body += b"0\r\n" + answers.readline()
    else:
        size = int(headers.get("content-length", 0))
        body = answers.read(size)
        if len(body) < size:
            raise ConnectionResetError("the server closed the connection")
    return "\r\n".join(lines).encode("latin-1") + body


def without(server: Minio, request: Request, name: str) -> None:
    """Remove a header from a request and sign it again, as if the client had never sent it.

    Args:
        server: The server, whose credentials sign the request.
        request: The request to change.
        name: The header's name, in lower case.
    """
    if request.headers.pop(name, None) is None:
        return
    method, path, _ = request.line.split(" ")
    kept = {k: v for k, v in request.headers.items() if k not in ("authorization", "x-amz-date")}
    signed = AWSRequest(method, f"http://{kept['host']}{path}", kept, request.body)
    S3SigV4Auth(Credentials(server.user, server.password), "s3", "us-east-1").add_auth(signed)
    request.headers = {k.lower(): v for k, v in signed.headers.items()}


@contextlib.contextmanager
def start_proxy(port: int) -> Iterator[Proxy]:
    """Yield a proxy in front of 127.0.0.1:port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        # Small kernel buffers, so that a slow proxy also slows a writing client.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _AT_ONCE)
        proxy = Proxy(port, url=f"http://127.0.0.1:{listener.getsockname()[1]}")

        def accept() -> None:
            with contextlib.suppress(OSError):  # the end of the test closed the listener
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=proxy.serve, args=(client,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield proxy
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
