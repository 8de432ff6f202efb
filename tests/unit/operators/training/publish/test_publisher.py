"""A rank's part in comparing policies, and which versions it writes whole or as differences."""

import threading

import numpy as np
import pytest
import torch.distributed as dist

from operators.training.background import Background
from operators.training.publish.publisher import Publisher, PublishOptions, Stored
from pipeline.policies.coding import encode
from pipeline.policies.fetch import fetch_policy
from pipeline.policies.versions import read_version, weights_of
from pipeline.policies.weights import TensorPlace
from pipeline.store import open_store
from tests.patience import PATIENCE_S
from tests.policies import write_policy

SIZE = 64


class Model:
    """A fake exporter with one tensor of this rank, followed by a part of another rank's tensor."""

    files = ((TensorPlace("a", "U8", (SIZE,), 0, SIZE),),)
    listed = ((("a", SIZE),),)
    size = SIZE

    def __init__(self):
        self.content = bytearray(SIZE)
        self.sent = 0

    def change(self, count):
        """Change `count` values: every second one, from the tensor's beginning."""
        for at in range(0, 2 * count, 2):
            self.content[at] += 1

    def tensors(self, prepare):
        prepare(SIZE)
        yield memoryview(bytes(self.content))
        self.sent += 1

    def untrained(self):
        return iter(())


@pytest.fixture(scope="module", autouse=True)
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def publishing(request, tmp_path):
    """A publisher of differences with its model, store and background.

    One in N versions is whole, where N is the fixture's parameter.
    """
    source, scratch = tmp_path / "source", tmp_path / "scratch"
    source.mkdir()
    scratch.mkdir()
    store, model = open_store(str(tmp_path / "store")), Model()
    options = PublishOptions(SIZE, PATIENCE_S, every=getattr(request, "param", 8))
    with Background() as background:
        publisher = Publisher(store, model, source, scratch, background, options)
        yield publisher, model, store, background


def publish(publishing, version: int, change: int = 1) -> Stored:
    """Train the model and publish it; return the result after the commit.

    Args:
        publishing: The fixture's parts.
        version: The version to publish.
        change: The number of values that change.
    """
    publisher, model, _, background = publishing
    found: list[Stored] = []
    model.change(change)
    publisher.publish(version, found.append)
    background.finish()
    return found[0]


def base_of(store, version: int) -> int | None:
    """Return the base of a version; None if the version is whole."""
    difference = read_version(store, version).difference
    return None if difference is None else difference.base


def fetched(store, version: int, folder) -> bytes:
    """Return the bytes of the tensor in a version."""
    fetch_policy(store, version, folder)
    return (folder / "model.safetensors").read_bytes()[-SIZE:]


def test_a_rank_sends_all_its_parts_for_a_comparison(publishing):
    """Another rank waits for parts of tensors that follow this rank's last own tensor."""
    publisher, model, _, background = publishing
    publisher.compare(1, "0" * 64, lambda _: None)
    background.finish()
    assert model.sent == 1


def test_a_versions_bytes_are_kept_until_it_is_uploaded(publishing, tmp_path):
    """The bytes are kept even if another trainer wrote the next version."""
    publisher, model, store, background = publishing
    may_upload = threading.Event()
    background.submit("waiting", lambda: may_upload.wait(PATIENCE_S) and None)
    publisher.publish(1, lambda _: None)
    publisher.compare(2, "0" * 64, lambda _: None)
    model.change(1)
    threading.Timer(0.5, may_upload.set).start()
    publisher.publish(3, lambda _: None)
    background.finish()
    assert fetched(store, 1, tmp_path / "fetched") == bytes(SIZE)
    assert base_of(store, 3) is None
    assert weights_of(store, 1) != weights_of(store, 3)


@pytest.mark.parametrize("publishing", [2], indirect=True)
def test_one_in_every_versions_is_whole(publishing):
    store = publishing[2]
    for version in range(1, 6):
        publish(publishing, version)
    assert [base_of(store, version) for version in range(1, 6)] == [None, 1, None, 3, None]


def test_a_version_is_whole_if_its_changes_take_half_of_its_size(publishing):
    """The next version is a difference from it."""
    _, model, store, _ = publishing
    publish(publishing, 1)
    before = bytes(model.content)
    publish(publishing, 2, change=8)
    assert SIZE / 2 < len(encode(before, model.content, 1)) < SIZE
    publish(publishing, 3)
    assert [base_of(store, version) for version in (1, 2, 3)] == [None, None, 2]


def test_the_version_after_another_writers_commit_is_whole(publishing, tmp_path):
    """Another trainer committed other weights first, so this trainer's are not in the store."""
    _, model, store, _ = publishing
    publish(publishing, 1)
    write_policy(store, 2, {"a": np.full(SIZE, 9, np.uint8)})
    assert publish(publishing, 2).drifted
    publish(publishing, 3)
    assert base_of(store, 3) is None
    assert fetched(store, 3, tmp_path / "fetched") == bytes(model.content)
