"""A TCP proxy before a server, which can lose answers and change requests on their way.

It understands just enough HTTP/1.1 to know where a request ends: Content-Length, one at a time on
each connection, as boto3 sends them.
"""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.minio import Minio


@dataclass
class Request:
    """What came from the client. Header names are in lower case."""

    line: str
    headers: dict[str, str]
    body: bytes = b""

    def to_bytes(self) -> bytes:
        lines = [self.line, *(f"{name}: {value}" for name, value in self.headers.items())]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


Change = Callable[[Request], None]


@dataclass
class Proxy:
    """Forwards to `port`; `change` may edit each request before it goes on."""

    port: int
    change: Change = lambda request: None
    loses: Callable[[Request], bool] = lambda request: False
    """Whether the answer to a request is thrown away, with the connection."""
    lost: list[str] = field(default_factory=list)
    """First lines of the requests whose answers were lost."""
    seen: list[str] = field(default_factory=list)
    """First lines of all requests."""
    url: str = ""

    def serve(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", self.port)) as server,
        ):
            reader, answers = client.makefile("rb"), server.makefile("rb")
            while (request := _read_request(reader, client)) is not None:
                self.seen.append(request.line)
                self.change(request)
                server.sendall(request.to_bytes())
                answer = _read_answer(answers, head=request.line.startswith("HEAD"))
                if self.loses(request):
                    self.lost.append(request.line)
                    return
                client.sendall(answer)


def _headers(reader) -> tuple[str, dict[str, str]] | None:
    line = reader.readline().decode("latin-1").strip()
    if not line:
        return None
    headers = {}
    while text := reader.readline().decode("latin-1").strip():
        name, _, value = text.partition(":")
        headers[name.lower()] = value.strip()
    return line, headers


def _read_request(reader, client: socket.socket) -> Request | None:
    found = _headers(reader)
    if found is None:
        return None
    line, headers = found
    if headers.pop("expect", "") == "100-continue":
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    return Request(line, headers, reader.read(int(headers.get("content-length", 0))))


def _read_answer(answers, head: bool) -> bytes:
    found = _headers(answers)
    assert found is not None, "the server closed the connection"
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
        body = answers.read(int(headers.get("content-length", 0)))
    return "\r\n".join(lines).encode("latin-1") + body


def without(server: Minio, request: Request, name: str) -> None:
    """Take a header out of a request and sign it anew, as if the client had never sent it."""
    if request.headers.pop(name, None) is None:
        return
    method, path, _ = request.line.split(" ")
    kept = {k: v for k, v in request.headers.items() if k not in ("authorization", "x-amz-date")}
    signed = AWSRequest(method, f"http://{kept['host']}{path}", kept, request.body)
    S3SigV4Auth(Credentials(server.user, server.password), "s3", "us-east-1").add_auth(signed)
    request.headers = {k.lower(): v for k, v in signed.headers.items()}


@contextlib.contextmanager
def start_proxy(port: int) -> Iterator[Proxy]:
    """A proxy before 127.0.0.1:port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        proxy = Proxy(port, url=f"http://127.0.0.1:{listener.getsockname()[1]}")

        def accept() -> None:
            with contextlib.suppress(OSError):  # the listener was closed: the end
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
