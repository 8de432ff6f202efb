"""The policy benchmark at a tiny size: all ways of transferring a policy give the same weights."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from benchmarks.policies import parties, weights
from benchmarks.policies.__main__ import Way, table_of
from pipeline.policies.versions import read_version
from pipeline.store import open_store

SIZE = 3 << 20


class Alone:
    """A barrier for a single rank."""

    def wait(self, timeout: float) -> None: ...


@pytest.fixture
def small_pools(monkeypatch):
    for name, size in (("POOL", 1 << 18), ("EMBEDDING", 1 << 18), ("EXPERT", 1 << 16)):
        monkeypatch.setattr(weights, name, size)
    weights.pools.cache_clear()
    yield
    weights.pools.cache_clear()


def written(uri: str, version: int, whole: bool) -> list[parties.Spent]:
    """Write a version as each rank in turn; rank 0 comes last, because it waits for the others."""
    numbers = [*range(1, parties.RANKS), 0]
    return [parties.rank(uri, SIZE, version, number, whole, Alone()) for number in numbers]


def test_all_ways_transfer_the_same_weights_and_a_difference_has_few_bytes(small_pools, tmp_path):
    before, now = f"{tmp_path}/serial", f"{tmp_path}/now"
    folder = str(tmp_path / "workers")
    ways = {
        "serial": Way(
            [parties.serial_rank(before, SIZE, 0, Alone())],
            [parties.serial_worker(before, 0, folder, Alone())],
            0.0,
        ),
        "whole": Way(written(now, 0, True), [], 0.0),
    }
    ways["whole"].workers.append(parties.worker(now, 0, f"{folder}/whole", Alone()))
    difference = written(now, 1, False)
    patched = parties.worker(now, 1, f"{folder}/patched", Alone())
    ways["difference"] = Way(difference, [patched], 0.0)

    store = open_store(now)
    assert read_version(store, 0).difference is None
    assert read_version(store, 1).difference.base == 0
    sent = {name: sum(one.sent for one in way.ranks) for name, way in ways.items()}
    assert sent["serial"] == pytest.approx(sent["whole"], rel=0.01)
    assert sent["difference"] < 0.1 * sent["whole"]
    assert all(way.seconds > 0 for way in ways.values())
    assert [row[0] for row in table_of({SIZE: ways}).rows] == ["**0.0 GB**", *ways]


def test_of_the_workers_that_share_a_copy_one_fetches(small_pools, tmp_path):
    uri, start = f"{tmp_path}/now", Barrier(2)
    written(uri, 0, True)
    written(uri, 1, False)
    for version in (0, 1):
        with ThreadPoolExecutor(2) as threads:
            work = [(uri, version, str(tmp_path / "copy"), start)] * 2
            sent = sorted(one.sent for one in threads.map(lambda of: parties.worker(*of), work))
        assert sent == [0, read_version(open_store(uri), version).size]


def test_each_rank_gets_about_the_same_number_of_bytes(small_pools):
    found = [weights.of_rank(SIZE, rank, 4) for rank in range(4)]
    names = [piece.name for mine in found for piece in mine]
    assert sorted(names) == sorted(piece.name for piece in weights.pieces(SIZE))
    loads = [sum(piece.size for piece in mine) for mine in found]
    assert max(loads) - min(loads) <= weights.EMBEDDING
