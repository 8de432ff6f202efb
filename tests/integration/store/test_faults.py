"""The s3:// store against a real MinIO that stops, is paused, loses answers or changes its keys."""

import logging
import threading
import tracemalloc

import pytest

from pipeline.run.commit import commit
from pipeline.store import ObjectExistsError, StoreError, open_store
from pipeline.store.s3 import S3Store
from pipeline.store.s3_upload import PART
from tests.minio import new_place, start_minio, use
from tests.proxy import start_proxy, without

pytestmark = pytest.mark.integration

SIZES = pytest.mark.parametrize("size", [1000, PART + 1000])


@pytest.fixture
def own_minio(tmp_path, monkeypatch):
    """A server that the test may stop."""
    with start_minio(tmp_path) as server:
        use(server, monkeypatch)
        yield server


@pytest.fixture
def proxy(minio, s3_uri, monkeypatch):
    """A proxy before the session's server, which this process's stores now go through."""
    with start_proxy(minio.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


def loses(proxy, method: str, times: int = 1) -> None:
    """Lose the answers to the first requests that begin with `method` and end the creation."""

    def lost(request) -> bool:
        ends = request.line.startswith("PUT") or "uploadId=" in request.line
        return request.line.startswith(method) and ends and len(proxy.lost) < times

    proxy.loses = lost


# Lost answers


@SIZES
def test_ones_own_object_is_recognised_when_the_answer_was_lost(proxy, s3_uri, size):
    """The server has made the object, the answer is lost, the next try is told that it exists."""
    loses(proxy, "PUT" if size < PART else "POST")
    store = open_store(s3_uri)
    store.create("key", b"x" * size)
    assert len(proxy.lost) == 1
    assert store.read("key") == b"x" * size
    assert list(store.debris("")) == []


@SIZES
def test_anothers_object_is_not_taken_for_ones_own(proxy, minio, s3_uri, size, monkeypatch):
    """While the answer is lost: the object that stands is another's, with the same content."""
    store = open_store(s3_uri)
    store.create("key", b"x" * size)
    loses(proxy, "PUT" if size < PART else "POST")
    with pytest.raises(ObjectExistsError, match="create key"):
        store.create("key", b"x" * size)
    assert len(proxy.lost) == 1


def test_a_lost_answer_to_a_commit(proxy, s3_uri):
    loses(proxy, "PUT", times=2)
    done = commit(open_store(s3_uri), "c.json", {"who": 1}, "aaaaaaaa")
    assert done.ours
    assert len(proxy.lost) == 2
    assert not commit(open_store(s3_uri), "c.json", {"who": 2}, "bbbbbbbb").ours


def test_lost_answers_while_reading(proxy, s3_uri):
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
    """A proxy strips the header, of all requests or only of those that complete an upload."""
    proxy.change = lambda request: without(minio, request, "if-none-match")
    store = open_store(s3_uri)
    with pytest.raises(StoreError, match="PutObject with If-None-Match replaced an object") as e:
        store.probe()
    assert "conditional writes" in str(e.value)
    assert list(store.list("")) == []

    def strip(request) -> None:
        if request.line.startswith("POST"):
            without(minio, request, "if-none-match")

    proxy.change = strip
    with pytest.raises(StoreError, match="CompleteMultipartUpload with If-None-Match replaced"):
        store.probe()
    assert list(store.list("")) == []
    assert list(store.debris("")) == []


def test_a_server_that_ignores_ranges_is_refused(proxy, minio, s3_uri):
    proxy.change = lambda request: without(minio, request, "range")
    store = open_store(s3_uri)
    store.create("key", b"0123456789")
    with pytest.raises(StoreError, match="asked for bytes=2-4, the server sent 10 bytes"):
        store.read_range("key", 2, 3)


# Servers that do not answer


@SIZES
def test_a_server_that_restarts_is_waited_for(own_minio, size, caplog):
    """Stopped before a write and before a read; the log says that it waits, and for how long."""
    store = open_store(new_place())
    store.create("other", b"y" * size)
    for use_store in (
        lambda: store.create("key", b"x" * size),
        lambda: store.read_ranges("other", [(0, 10), (size - 10, 10)]),
        lambda: list(store.list("")),
        lambda: store.size("other"),
    ):
        own_minio.stop()
        starter = threading.Timer(0.3, own_minio.start)
        starter.start()
        use_store()
        starter.join()
    assert store.read("key") == b"x" * size
    assert list(store.debris("")) == []
    [first, *_, last] = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "create key in s3://" in first
    assert "try 2 follows, given up in 120 s" in first
    assert own_minio.url in first
    assert "answered at try" in last


def test_a_server_that_is_paused_is_waited_for(own_minio):
    store = open_store(new_place())
    store.create("key", b"x")
    own_minio.pause()
    threading.Timer(1.0, own_minio.resume).start()
    assert store.read("key") == b"x"


def test_giving_up_says_what_was_tried(own_minio):
    own_minio.stop()
    store = S3Store(new_place(), patience_s=1.0)
    with pytest.raises(StoreError, match=r"tried [2-9] times in 1 s") as error:
        store.create("key", b"x")
    for part in ("create key", "PutObject", "retrace-tests", own_minio.url, "AWS_ENDPOINT_URL"):
        assert part in str(error.value)
    with (
        store.upload("key") as upload,
        pytest.raises(StoreError, match="CreateMultipartUpload"),
    ):
        upload.write(b"x" * 2 * PART)


def test_leaving_an_upload_does_not_wait_for_a_server_that_is_gone(own_minio, caplog):
    """Parts under way are given up, and the log says what is left for a sweep."""
    store = open_store(new_place())
    with store.upload("key") as upload:
        upload.write(b"x" * (PART + 1))
        own_minio.stop()
    assert "left for a sweep" in caplog.text


# Credentials


def test_revoked_credentials_are_refused_at_once(own_minio, caplog):
    """No retry on 403, after one look for new credentials; nothing of the secret is said."""
    store = open_store(new_place())
    store.create("key", b"x")
    own_minio.restart(user="second")
    for use_store in (
        lambda: store.create("other", b"x"),
        lambda: store.read("key"),
        lambda: store.size("key"),
        lambda: list(store.list("")),
        lambda: store.delete("key"),
    ):
        with pytest.raises(StoreError, match="403 InvalidAccessKeyId") as error:
            use_store()
        assert "give valid credentials" in str(error.value)
        assert own_minio.password not in str(error.value)
    assert "fetching the credentials anew" in caplog.text
    assert "follows" not in caplog.text  # nothing was tried later again
    assert own_minio.password not in caplog.text


def test_rotated_credentials_are_fetched_anew(own_minio, monkeypatch, tmp_path):
    """The keys change under a running process, and so does the file that boto3 reads them from."""
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
            lambda: store.create("large", b"x" * 2 * PART),
        )
    ):
        own_minio.restart(user=f"user-{number}")
        write_keys()
        use_store()
    assert store.size("large") == 2 * PART


def test_no_credentials(own_minio, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match=r"NoCredentialsError.*give valid credentials"):
        open_store(new_place()).read("key")


# Limits of multipart uploads


def test_an_upload_of_too_many_parts_is_refused(s3_uri, monkeypatch):
    monkeypatch.setattr("pipeline.store.s3_upload.MAX_PARTS", 2)
    store = open_store(s3_uri)
    with (
        store.upload("key") as upload,
        pytest.raises(StoreError, match=r"\(2 parts of a multipart upload\); write it as"),
    ):
        upload.write(b"x" * 4 * PART)
    assert list(store.debris("")) == []


def test_a_large_local_file_gets_larger_parts(s3_uri, monkeypatch, tmp_path):
    monkeypatch.setattr("pipeline.store.s3_upload.MAX_PARTS", 2)
    monkeypatch.setattr("pipeline.store.s3.MAX_PARTS", 2)
    path = tmp_path / "local"
    path.write_bytes(b"abcdefg" * PART)
    store = open_store(s3_uri)
    store.create_from_file("key", path)
    assert store.read("key") == b"abcdefg" * PART


def test_an_upload_holds_few_parts_in_memory(s3_uri):
    """However much is written, and however fast."""
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
    assert peak < 64 << 20


def test_an_upload_that_was_swept_is_an_error(s3_uri):
    store = open_store(s3_uri)
    with store.upload("key") as upload:
        upload.write(b"x" * 2 * PART)
        [found] = store.debris("")
        store.discard(found)
        with pytest.raises(StoreError, match="completed or swept it: make the object again"):
            upload.finish()
    assert store.size("key") is None


# Wrong places


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("AWS_PROFILE", "nobody", "profile .*nobody"),
        ("AWS_CA_BUNDLE", "/no/such/file", "AWS_CA_BUNDLE: found /no/such/file"),
        ("AWS_ENDPOINT_URL_S3", "not a url", "not a url"),
        ("RETRACE_S3_PATH_STYLE", "yes", "RETRACE_S3_PATH_STYLE: found 'yes'"),
    ],
)
def test_wrong_settings(s3_uri, monkeypatch, variable, value, says):
    monkeypatch.setenv(variable, value)
    with pytest.raises(StoreError, match=f"read key in s3://.*{says}"):
        open_store(s3_uri).read("key")


def test_a_password_in_an_endpoint_is_not_repeated(s3_uri, minio, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", minio.url.replace("://", "://me:hidden@"))
    with pytest.raises(StoreError) as error:
        open_store("s3://no-such-bucket/x").create("key", b"")
    assert "hidden" not in str(error.value)


def test_a_bucket_that_is_not_there(s3_uri):
    with pytest.raises(StoreError, match=r"404 NoSuchBucket.*create the bucket"):
        open_store("s3://no-such-bucket/x").probe()


@pytest.mark.parametrize(
    "uri", ["s3://", "s3:///prefix", "s3://Bucket", "s3://b", "s3://bucket//a"]
)
def test_uris_that_name_no_place(uri):
    with pytest.raises(StoreError):
        open_store(uri)


def test_uris():
    assert open_store("s3://bucket").uri == open_store("s3://bucket/").uri == "s3://bucket"
    assert open_store("s3://bucket/a/b c/").uri == "s3://bucket/a/b c"
    with pytest.raises(StoreError, match="never part of a URI") as error:
        open_store("s3://key:hidden@bucket/a")
    assert "hidden" not in str(error.value)
