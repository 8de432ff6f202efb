"""Sets that one process passes to another arrive unchanged, even over a rate-limited link."""

import os
import subprocess
from dataclasses import replace

import pytest

from benchmarks.handover import __main__ as handover
from benchmarks.handover import link, wire
from benchmarks.handover.link import Host
from benchmarks.handover.party import party
from benchmarks.handover.roles import Rollout
from benchmarks.routes.recordings import uniform
from benchmarks.ways import ours
from pipeline.store import open_store
from pipeline.traces import TraceError

RECORDING = uniform(16, 4, samples=6, rows=9, layers=2)
SAMPLES = ours.samples_of(RECORDING)
SHARDS = [SAMPLES[:3], SAMPLES[3:]]
IDS = [[sample.id for sample in shard] for shard in SHARDS]


def write(store, shards=SHARDS):
    for number, shard in enumerate(shards):
        ours.write(store, shard, ours.geometry_of(RECORDING), number)


def test_shards_are_read_before_the_seal_and_compared_with_it(tmp_path, monkeypatch):
    """All samples arrive; a shard that differs from the sealed one is refused."""
    store = open_store(f"{tmp_path}/good")
    write(store)
    found = ours.read_ahead(store, IDS)
    assert list(found) == [id for ids in IDS for id in ids]

    other = open_store(f"{tmp_path}/other")
    write(other, [[replace(sample, reward=9.0) for sample in shard] for shard in SHARDS])
    good = open_store(f"{tmp_path}/again")
    write(good)
    monkeypatch.setattr(ours, "seal", lambda store, *rest: ours_seal(other, *rest))
    with pytest.raises(TraceError, match="was not sealed with"):
        ours.read_ahead(good, IDS)


ours_seal = ours.seal


def test_pieces_in_peers_formats_arrive_in_order_over_http_and_tcp():
    rollout = Rollout()
    rollout._recording = RECORDING
    for peer in (*handover.OVERLAPPED, handover.RAW):
        port, pieces, shape_LK = rollout.serve(peer.name, "127.0.0.1")
        decoded = _received(rollout, peer, port, pieces, shape_LK)
        assert ours_digests(decoded) == ours_digests(RECORDING.routes), peer.name
        assert rollout.close() > 0


def _received(rollout, peer, port, pieces, shape_LK):
    from concurrent.futures import ThreadPoolExecutor

    receive = wire.over_http if peer.medium == "http" else wire.over_tcp
    with ThreadPoolExecutor(1) as thread:
        sending = thread.submit(rollout.send, True)
        found = receive("127.0.0.1", port, pieces, lambda piece: peer.decode(piece, shape_LK))
        sending.result()
    return [array for arrays in found for array in arrays]


def ours_digests(arrays):
    from benchmarks.routes.recordings import set_digests

    return set_digests(arrays)


def test_an_error_in_a_party_is_raised_in_the_caller():
    with party(Rollout, Host("127.0.0.1", None)) as rollout:
        with pytest.raises(RuntimeError, match="no attribute '_shards'"):
            rollout.call("ids")
        assert len(rollout.call("generate", 8192, 6, 2)) == 8


@pytest.mark.integration
def test_every_format_transfers_a_step_on_one_machine():
    """`at_link` raises an error if sets differ. The number of bytes depends on the format."""
    found = handover.at_link(None, 4096, 4, 1)
    ways = {peer.name for peer in (*handover.OVERLAPPED, handover.RAW)}
    assert ways < set(found)
    assert f"{handover.OURS}, folder" in found
    raw = found[handover.RAW.name].sent
    assert found[handover.OVERLAPPED[0].name].sent > 4 / 3 * raw
    assert found[f"{handover.OURS}, folder"].sent < raw / 2
    rows = handover.goals_of({"loopback": found}).rows
    assert [row[4] for row in rows] == [">= 1x"] * len(rows)


@pytest.mark.integration
@pytest.mark.skipif(link.why_not() is not None, reason=str(link.why_not()))
def test_the_kernel_limits_a_link():
    """64 MB take half a second at 1 Gbit/s on any machine; no namespace remains afterwards."""
    before = namespaces()
    namespace = os.readlink("/proc/thread-self/ns/net")
    with link.hosts(1) as hosts:
        with party(Rollout, hosts.rollout) as rollout, party(_Receiver, hosts.trainer) as trainer:
            rollout.call("generate", 32_768, 42, 1)
            port, pieces, shape_LK = rollout.call("serve", handover.RAW.name, hosts.rollout.address)
            trainer.start(
                "receive", handover.RAW.name, hosts.rollout.address, port, pieces, shape_LK
            )
            rollout.start("send", False)
            seconds = trainer.finish().result
            rollout.finish()
            sent = rollout.call("close")
        with hosts.store.entered():
            assert os.readlink("/proc/thread-self/ns/net") != namespace
        assert os.readlink("/proc/thread-self/ns/net") == namespace
    assert sent == 32_768 * 42 * 8
    assert seconds > 0.9 * sent * 8 / 1e9
    assert namespaces() == before


def namespaces() -> set[str]:
    """Return the network namespaces, except those of a Kubernetes node, because these may change
    during the test."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return {line for line in listed.splitlines() if not line.startswith("cni-")}


class _Receiver:
    def receive(self, *arguments):
        import time

        from benchmarks.handover.roles import Trainer

        began = time.perf_counter()
        Trainer().receive(*arguments)
        return time.perf_counter() - began
