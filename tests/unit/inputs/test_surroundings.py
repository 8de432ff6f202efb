"""A check finds servers that do not answer and folders that cannot be written."""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipeline.errors import InputError
from pipeline.inputs.space import check_scratch
from pipeline.store import s3 as s3_store
from pipeline.store import s3_client
from tests.unit.inputs.small_inputs import check, check_error, load

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


class Silent:
    """A server that accepts connections and never answers."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]


@contextlib.contextmanager
def answering(status: int) -> Iterator[tuple[str, list[str]]]:
    """Start a server that answers each request with `status`; yield its URL and its requests."""
    seen: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.path)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, and less patience than users have."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(s3_store, "GREETING_S", 1.0)


SILENT = Silent()


@pytest.mark.usefixtures("s3")
@pytest.mark.parametrize(
    "endpoint",
    [
        "http://127.0.0.1:9",
        f"http://127.0.0.1:{SILENT.port}",
        f"https://127.0.0.1:{SILENT.port}",
        "http://store.invalid:9000",
    ],
    ids=["refused", "silent", "silent-tls", "unknown"],  # all processes collect the same names
)
def test_a_server_that_does_not_answer_is_asked_once(
    settings, monkeypatch: pytest.MonkeyPatch, endpoint: str
):
    """The other inputs on that server are refused at once, and local problems are reported too."""
    pauses: list[str] = []
    pause_s = s3_client.Tries.pause_s
    monkeypatch.setattr(
        s3_client.Tries, "pause_s", lambda self, text: (pauses.append(text), pause_s(self, text))[1]
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    found = check_error(
        settings,
        "store.uri=s3://bucket/store",
        "actor_rollout_ref.model.path=s3://bucket/model",
        "data.val_files=absent.parquet",
    )
    keys = [problem.split(":")[0] for problem in found]
    assert {"store.uri", "actor_rollout_ref.model.path", "data.val_files"} <= {*keys}
    assert pauses
    assert all(text.startswith("HeadBucket /bucket at ") for text in pauses)
    [problem] = [problem for problem in found if problem.startswith("store.uri")]
    assert f"at {endpoint}" in problem


@pytest.mark.usefixtures("s3")
def test_only_servers_elsewhere_are_reached_through_a_proxy(monkeypatch: pytest.MonkeyPatch):
    with answering(404) as (here, direct), answering(404) as (proxy, proxied):
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for endpoint in (here, here.replace("127.0.0.1", "localhost"), "http://s3.example.org"):
            monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
            s3_store.S3Store("s3://bucket").greet()
    assert direct == ["/bucket", "/bucket"]
    assert proxied == ["http://s3.example.org/bucket"]


@pytest.mark.parametrize("kind", ["absent", "a file", "not writable", "full"])
def test_an_unusable_tmpdir_is_refused(
    settings, tmp_path, monkeypatch: pytest.MonkeyPatch, kind: str
):
    place = tmp_path / "scratch"
    if kind == "a file":
        place.write_text("")
    elif kind == "not writable":
        if os.getuid() == 0:
            pytest.skip("root may write everywhere")
        place.mkdir(mode=0o500)
    elif kind == "full":
        if not os.path.exists("/dev/full"):
            pytest.skip("no /dev/full here")
        place.mkdir()
        monkeypatch.setattr("tempfile.TemporaryFile", lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    monkeypatch.setenv("TMPDIR", str(place))
    with pytest.raises(InputError) as error:
        check_scratch(load(settings))
    assert error.value.problems[0].startswith("TMPDIR: ")


def test_a_tmpdir_that_is_too_long_for_sockets_is_refused(
    settings, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    """Only engines of several processes create sockets."""
    long = tmp_path / ("x" * 70)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    one = load(settings)
    check_scratch(one)
    rollout = one.actor_rollout_ref.rollout.model_copy(update={"tensor_model_parallel_size": 2})
    actor = one.actor_rollout_ref.model_copy(update={"rollout": rollout})
    with pytest.raises(InputError, match="TMPDIR: found a path of"):
        check_scratch(one.model_copy(update={"actor_rollout_ref": actor}))


def test_problems_with_the_surroundings_are_reported_together(
    settings, tmp_path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    found = check_error(settings)
    assert [problem.split(":")[0] for problem in found] == ["TMPDIR", "PREFECT_API_URL"]
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with answering(200) as (url, seen):
        monkeypatch.setenv("PREFECT_API_URL", f"{url}/api")
        check(settings)
        assert seen == ["/api/health"]
