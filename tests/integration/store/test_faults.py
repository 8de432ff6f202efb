"""The s3:// store with a real MinIO that stops, pauses, loses responses or changes its keys."""

import logging
import threading
import tracemalloc
from functools import partial

import pytest

from pipeline.run.commit import commit
from pipeline.store import ObjectExistsError, StoreError, open_store
from pipeline.store.s3 import S3Store
from pipeline.store.s3_upload import PART
from tests.minio import new_place, start_minio, use
from tests.patience import eventually
from tests.proxy import start_proxy, without

pytestmark = pytest.mark.integration

SIZES = pytest.mark.parametrize("size", [1000, PART + 1000])


@pytest.fixture
def own_minio(tmp_path, monkeypatch):
    """Start a server that the test may stop."""
    with start_minio(tmp_path) as server:
        use(server, monkeypatch)
        yield server


@pytest.fixture
def proxy(minio, s3_uri, monkeypatch):
    """Start a proxy for the session's server; this process's stores send requests through it."""
    with start_proxy(minio.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


def loses(proxy, method: str, times: int = 1) -> None:
    """Lose the answers to the first requests with this method that complete an object."""

    def lost(request) -> bool:
        ends = "uploads" not in request.line and "partNumber=" not in request.line
        return request.line.startswith(method) and ends and len(proxy.lost) < times

    proxy.loses = lost


def uploaded(store, key: str, data: bytes) -> None:
    with store.upload(key) as upload:
        upload.write(data)
        upload.finish()


# Lost answers


def test_an_own_object_is_recognised_after_a_lost_answer(proxy, s3_uri):
    """The server creates the object but the answer is lost; the next try finds the object."""
    loses(proxy, "PUT")
    store = open_store(s3_uri)
    store.create("key", b"x")
    assert len(proxy.lost) == 1
    assert store.read("key") == b"x"


def test_anothers_object_is_not_taken_for_an_own_one(proxy, s3_uri):
    """The answer is lost, and the key already holds another writer's object with equal content."""
    store = open_store(s3_uri)
    store.create("key", b"x")
    loses(proxy, "PUT")
    with pytest.raises(ObjectExistsError, match="create key"):
        store.create("key", b"x")
    assert len(proxy.lost) == 1


@SIZES
@pytest.mark.parametrize("way", ["pieces", "file"])
def test_a_data_object_is_complete_after_a_lost_answer(proxy, s3_uri, tmp_path, size, way):
    """The answer that is lost is the one to the request that completes the object."""
    loses(proxy, "PUT" if size < PART else "POST")
    store = open_store(s3_uri)
    if way == "pieces":
        uploaded(store, "key", b"x" * size)
    else:
        (tmp_path / "file").write_bytes(b"x" * size)
        store.upload_file("key", tmp_path / "file")
    assert len(proxy.lost) == 1
    assert store.read("key") == b"x" * size
    assert list(store.debris("")) == []


def test_a_commit_is_recognised_after_a_lost_answer(proxy, s3_uri):
    loses(proxy, "PUT", times=2)
    done = commit(open_store(s3_uri), "c.json", {"who": 1}, "aaaaaaaa")
    assert done.ours
    assert len(proxy.lost) == 2
    assert not commit(open_store(s3_uri), "c.json", {"who": 2}, "bbbbbbbb").ours


def test_reads_are_repeated_after_lost_answers(proxy, s3_uri):
    store = open_store(s3_uri)
    store.create("key", b"0123456789" * 1000)
    loses(proxy, "GET", times=2)
    proxy.loses = lambda request: request.line.startswith("GET") and len(proxy.lost) < 2
    assert store.read("key") == b"0123456789" * 1000
    proxy.lost.clear()
    assert store.read_range("key", 5, 10) == b"5678901234"
    assert len(proxy.lost) == 2


# Servers that must be refused


def test_a_server_that_ignores_if_none_match_is_refused(proxy, minio, s3_uri):
    """A proxy strips the header from all requests."""
    proxy.change = lambda request: without(minio, request, "if-none-match")
    store = open_store(s3_uri)
    with pytest.raises(StoreError, match="PutObject with If-None-Match replaced an object") as e:
        store.probe()
    assert "conditional writes" in str(e.value)
    assert list(store.list("")) == []


def test_a_server_that_ignores_ranges_is_refused(proxy, minio, s3_uri):
    proxy.change = lambda request: without(minio, request, "range")
    store = open_store(s3_uri)
    store.create("key", b"0123456789")
    with pytest.raises(StoreError, match=r"the server sent 10 bytes as .*, expected bytes=2-4"):
        store.read_range("key", 2, 3)


# Servers that do not answer


@SIZES
def test_the_store_waits_for_a_server_that_restarts(own_minio, size, caplog):
    """The server stops before writes and reads; the log reports the wait and its limit."""
    store = open_store(new_place())
    store.create("other", b"y" * size)
    for use_store in (
        lambda: store.create("key", b"x" * size),
        lambda: uploaded(store, "uploaded", b"x" * size),
        lambda: store.read_ranges("other", [(0, 10), (size - 10, 10)]),
        lambda: list(store.list("")),
        lambda: store.size("other"),
    ):
        own_minio.stop()
        starter = threading.Timer(0.3, own_minio.start)
        starter.start()
        use_store()
        starter.join()
    assert store.read("key") == store.read("uploaded") == b"x" * size
    assert list(store.debris("")) == []
    [first, *_, last] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert first.startswith("PutObject /retrace-tests/")
    assert "/key at http" in first
    assert "retrying (try 2), giving up in 120 s" in first
    assert own_minio.url in first
    assert "answered on try" in last


def test_the_store_waits_for_a_paused_server(own_minio):
    store = open_store(new_place())
    store.create("key", b"x")
    own_minio.pause()
    resumer = threading.Timer(1.0, own_minio.resume)
    resumer.start()
    assert store.read("key") == b"x"
    resumer.join()


def test_the_store_gives_up_on_a_server_that_hangs(own_minio, monkeypatch):
    """If a server accepts connections but never answers, errors name the operation and the key."""
    monkeypatch.setattr("pipeline.store.s3_client._READ_TIMEOUT_S", 1)
    monkeypatch.setattr("pipeline.store.s3_client._CONNECT_TIMEOUT_S", 1)
    store, size = S3Store(new_place(), patience_s=1.0), PART + 1000
    store.create("other", b"x" * size)
    with store.upload("third") as upload:
        upload.write(b"x" * size)
        own_minio.pause()
        with pytest.raises(StoreError, match=r"^create third in s3://.*tried for"):
            upload.finish()
    for use_store, call in (
        (lambda: store.create("key", b"x"), "create key"),
        (lambda: store.read_ranges("other", [(0, 10), (size - 10, 10)]), "read other"),
        (lambda: list(store.list("steps/")), "list steps/"),
        (lambda: store.size("other"), "read other"),
        (lambda: store.delete("other"), "delete other"),
    ):
        with pytest.raises(StoreError, match=rf"^{call} in s3://.*Timeout.*; tried for 1 s"):
            use_store()
    own_minio.resume()
    assert store.size("other") == size


@SIZES
def test_the_store_waits_for_a_slow_server(proxy, s3_uri, monkeypatch, size):
    """A part takes 2 s, twice the socket's timeout for connections, which also limits each send."""
    monkeypatch.setattr("pipeline.store.s3_client._CONNECT_TIMEOUT_S", 1)
    proxy.rate = max(size, PART) / 2
    data = b"0123456789abcdef" * (max(size, PART - 1000) // 16)
    store = S3Store(s3_uri, patience_s=1.0)
    (store.create if size < PART else partial(uploaded, store))("key", data)
    assert store.read("key") == data
    assert [line for line in proxy.seen if line.startswith("PUT")] == list(
        dict.fromkeys(line for line in proxy.seen if line.startswith("PUT"))
    ), "a request was sent twice"


def test_the_error_after_giving_up_names_the_place(own_minio, caplog):
    own_minio.stop()
    store = S3Store(new_place(), patience_s=1.0)
    for create in (
        lambda: store.create("key", b"x"),
        lambda: uploaded(store, "key", b"x"),
        lambda: uploaded(store, "key", b"x" * 5 * PART),
    ):
        with pytest.raises(StoreError, match=r"tried for 1 s") as error:
            create()
        for part in ("create key", "retrace-tests", own_minio.url, "AWS_ENDPOINT_URL"):
            assert part in str(error.value)
    assert "retrying (try 2), giving up in 1 s" in caplog.text


def test_leaving_an_upload_does_not_wait_for_a_stopped_server(own_minio, caplog):
    """Parts in transfer are abandoned, and the log names the unfinished upload for a sweep."""
    store = open_store(new_place())
    with store.upload("key") as upload:
        upload.write(b"x" * (PART + 1))
        eventually(lambda: list(store.debris("")) or None, lambda: "the upload's first request")
        own_minio.stop()
    assert "can remove the unfinished upload" in caplog.text


# Credentials


def test_revoked_credentials_are_refused_immediately(own_minio, caplog):
    """A 403 causes one attempt to fetch new credentials and no retries. The secret is not shown."""
    store = open_store(new_place())
    store.create("key", b"x")
    own_minio.restart(user="second")
    for use_store in (
        lambda: store.create("other", b"x"),
        lambda: uploaded(store, "large", b"x" * 2 * PART),
        lambda: store.read("key"),
        lambda: store.size("key"),
        lambda: list(store.list("")),
        lambda: store.delete("key"),
    ):
        with pytest.raises(StoreError, match="403 InvalidAccessKeyId") as error:
            use_store()
        assert "pass valid credentials" in str(error.value)
        assert own_minio.password not in str(error.value)
    assert "fetching new credentials" in caplog.text
    assert "follows" not in caplog.text  # no retry was announced
    assert own_minio.password not in caplog.text


def test_rotated_credentials_are_fetched_again(own_minio, monkeypatch, tmp_path):
    """The server's keys and the file that boto3 reads change while the process runs."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    path = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    monkeypatch.setenv("AWS_PROFILE", "team")

    def write_keys() -> None:
        path.write_text(
            f"[team]\naws_access_key_id = {own_minio.user}\n"
            f"aws_secret_access_key = {own_minio.password}\n"
        )

    write_keys()
    store = open_store(new_place())
    store.create("key", b"x")
    for number, use_store in enumerate(
        (
            lambda: store.read("key"),
            lambda: store.size("key"),
            lambda: uploaded(store, "large", b"x" * 2 * PART),
        )
    ):
        own_minio.restart(user=f"user-{number}")
        write_keys()
        use_store()
    assert store.size("large") == 2 * PART


def test_missing_credentials_are_refused(own_minio, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match=r"NoCredentialsError.*pass valid credentials"):
        open_store(new_place()).read("key")


# Large uploads


def test_an_upload_keeps_few_parts_in_memory(s3_uri):
    """The peak memory does not grow with the amount or the speed of writes."""
    store = open_store(s3_uri)
    piece = b"x" * 1_000_000
    tracemalloc.start()
    try:
        with store.upload("key") as upload:
            for _ in range(150):
                upload.write(piece)
            upload.finish()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.size("key") == 150_000_000
    assert peak < 96 << 20


def test_an_upload_that_was_swept_is_an_error(s3_uri):
    store = open_store(s3_uri)
    with store.upload("key") as upload:
        upload.write(b"x" * 2 * PART)
        eventually(lambda: list(store.debris("")) or None, lambda: "the upload's first request")
        [found] = store.debris("")
        store.discard(found)
        with pytest.raises(
            StoreError, match="completed or swept this upload: write the object again"
        ):
            upload.finish()
    assert store.size("key") is None


# Invalid settings and places


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("AWS_PROFILE", "nobody", "profile .*nobody"),
        ("AWS_CA_BUNDLE", "/no/such/file", "AWS_CA_BUNDLE: found /no/such/file"),
        ("AWS_ENDPOINT_URL_S3", "not a url", "not a url"),
        ("RETRACE_S3_PATH_STYLE", "yes", "RETRACE_S3_PATH_STYLE: found 'yes'"),
    ],
)
def test_invalid_settings_are_refused(s3_uri, monkeypatch, variable, value, message):
    monkeypatch.setenv(variable, value)
    with pytest.raises(StoreError, match=f"read key in s3://.*{message}"):
        open_store(s3_uri).read("key")


def test_a_password_in_an_endpoint_is_not_repeated(s3_uri, minio, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", minio.url.replace("://", "://me:hidden@"))
    with pytest.raises(StoreError) as error:
        open_store("s3://no-such-bucket/x").create("key", b"")
    assert "hidden" not in str(error.value)


def test_a_missing_bucket_is_reported(s3_uri):
    with pytest.raises(StoreError, match=r"404 NoSuchBucket.*create the bucket"):
        open_store("s3://no-such-bucket/x").probe()


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///prefix", "s3://Bucket", "s3://b", "s3://bucket//a"]
)
def test_uris_without_a_valid_place_are_refused(uri):
    with pytest.raises(StoreError):
        open_store(uri)


def test_a_uri_is_normalised_and_must_not_contain_a_key():
    assert open_store("s3://bucket").uri == open_store("s3://bucket/").uri == "s3://bucket"
    assert open_store("s3://bucket/a/b c/").uri == "s3://bucket/a/b c"
    with pytest.raises(StoreError, match="never part of a URI") as error:
        open_store("s3://key:hidden@bucket/a")
    assert "hidden" not in str(error.value)
