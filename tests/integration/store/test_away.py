"""Transfers during which the S3 server is killed and started again.

These tests call the transfer code of trainers and workers; test_slow_store.py runs the processes.
"""

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.policies.cache import PolicyCache
from pipeline.policies.versions import publish_policy
from pipeline.run import keys
from pipeline.run.commit import fetch_file, put_file, sha256_of_file
from pipeline.store import Store, open_store
from tests.away import Away
from tests.exhaustive import sample_or_all
from tests.minio import Minio, new_place, start_minio, use
from tests.proxy import Proxy, start_proxy
from tests.weights import digest_of, some_weights

pytestmark = pytest.mark.integration
AWAY_S = sample_or_all(1, 20)
SIZE = 5 << 20
"""The number of 4-byte numbers in a file; the upload of such a file has three parts."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Minio]:
    with start_minio(tmp_path) as server:
        use(server, monkeypatch)
        yield server


@pytest.fixture
def proxy(server: Minio, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with start_proxy(server.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.url)
        yield proxy


def policy(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(some_weights(size=SIZE))
    (folder / "config.json").write_text("{}")
    return folder


def policy_up(store: Store, folder: Path) -> None:
    made = publish_policy(store, 1, policy(folder / "made"))
    assert made.body["weights_sha256"] == digest_of(folder / "made")
    assert open_store(store.uri).size(keys.policy(1)) is not None


def policy_down(store: Store, folder: Path) -> None:
    with closing(PolicyCache(store, folder)) as cache, cache.held(1) as held:
        assert held.weights == digest_of(held.folder) == digest_of(folder / "made")


def checkpoint_up(store: Store, folder: Path) -> None:
    path = folder / "saved"
    path.write_bytes(os.urandom(4 * SIZE))
    file = put_file(store, keys.checkpoint_file(1, "w", "__0_0.distcp"), path)
    assert (file.size, file.sha256) == (4 * SIZE, sha256_of_file(path))


def checkpoint_down(store: Store, folder: Path) -> None:
    path = folder / "loaded"
    file = put_file(store, keys.checkpoint_file(2, "w", "__0_0.distcp"), folder / "saved")
    fetch_file(store, file, path)
    assert sha256_of_file(path) == sha256_of_file(folder / "saved")


TRANSFERS = {
    policy_up: ("PUT ", "/policies/000001/"),
    policy_down: ("GET ", "/policies/000001/"),
    checkpoint_up: ("PUT ", "/checkpoints/000001/"),
    checkpoint_down: ("GET ", "/checkpoints/000002/"),
}


def test_a_transfer_continues_when_the_server_is_back(tmp_path: Path, server: Minio, proxy: Proxy):
    """Each transfer is interrupted in the middle and completes with the correct contents."""
    store = open_store(new_place())
    for transfer, place in TRANSFERS.items():
        with closing(Away(server, AWAY_S, {"it": place})) as away:
            proxy.change = away
            transfer(store, tmp_path)
        assert away.times_s["it"] >= AWAY_S, f"{transfer.__name__} ended before the server stopped"
