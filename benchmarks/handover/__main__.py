"""Measure the hand-over of arrays from the rollout process to the trainer's process.

    python -m benchmarks.handover [--tokens N] [--rounds N] [--gbit N ...]

The clock starts when the rollout process has the recorded routes (48 layers) as arrays. It stops
when the trainer's process has all of them. Both processes have started and finished their imports
before the clock starts. For each format, sending and receiving overlap as they do in its framework:

    Retrace   the rollout process writes 8 shards, two at a time; the trainer fetches and checks
              each committed shard, seals the step and compares the shards with the seal
    http      one response per sample, two requests at a time; the server encodes on request
    ray       one piece per sample or worker, encoded, sent and decoded in parallel; through shared
              memory on one machine, or through a connection between two machines

The kernel limits all links equally (benchmarks.handover.link). The rollout, the trainer and the
server of s3:// are simulated as three hosts. Retrace's bytes cross two links; the bytes of other
formats cross one. Without a limit, the rollout, the trainer and the server run on one host, and
Retrace's store is either a folder or the server. The formats take turns. The fastest of several
rounds counts, because other programs can only make a round slower. CPU s is the processor time of
all processes in that round. On two cores, a round takes at least half of that time.
"""

import argparse
import contextlib
import itertools
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.handover import link
from benchmarks.handover.party import Party, party
from benchmarks.handover.roles import Rollout, Trainer
from benchmarks.measure import machine
from benchmarks.minio import own_minio
from benchmarks.page import Table, arguments_of, block, publish, verdict
from benchmarks.routes.recordings import same_sets
from benchmarks.ways.peers import PEERS, RAW
from pipeline.traces import Compression

FOLDER = Path("outputs/benchmarks")
LAYERS, SHARDS, TOKENS = 48, 8, 1 << 20
OVERLAPPED = tuple(peer for peer in PEERS if peer.medium != "file" and "JSON" not in peer.name)
"""All peers except JSON, which takes minutes, and Parquet, which no framework sends."""
OURS = "Retrace"
COMPRESSIONS: dict[str, Compression] = {"": "zstd", ", lz4": "lz4", ", uncompressed": "none"}
"""Values of trace_compression to measure with a folder; each key is added to the format's name."""
FASTER = 2.5
"""Goal at 1 Gbit/s: speed of Retrace relative to the fastest other format."""


@dataclass(frozen=True)
class Once:
    """Result of one hand-over."""

    seconds: float
    cpu_s: float
    sent: int
    """Bytes that left the rollout process."""


Found = Mapping[str, Mapping[str, Once]]
"""The fastest hand-over for each link and format."""


def at_link(gbit: int | None, tokens: int, shards: int, rounds: int) -> dict[str, Once]:
    """Measure all formats over one link.

    Args:
        gbit: Limit of the link in Gbit/s; None for one host without a limit.
        tokens: Number of tokens to transfer.
        shards: Number of Retrace's shards.
        rounds: Number of rounds; the fastest counts.

    Returns:
        The fastest hand-over of each format, keyed by name.
    """
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(link.hosts(gbit))
        server = None
        if shutil.which("minio"):
            with hosts.store.entered():
                server = stack.enter_context(own_minio(hosts.store.address))
        rollout = stack.enter_context(party(Rollout, hosts.rollout))
        trainer = stack.enter_context(party(Trainer, hosts.trainer))
        expected = rollout.call("generate", tokens, LAYERS, shards)
        ways: dict[str, Callable[[], Once]] = {}
        for peer in (*OVERLAPPED, RAW):
            ways[peer.name] = lambda p=peer: _of_peer(p.name, rollout, trainer, hosts, gbit)
        if gbit is None:
            for name, compression in COMPRESSIONS.items():
                ways[f"{OURS}, folder{name}"] = lambda c=compression: _in_folder(
                    rollout, trainer, c
                )
        if server is not None:
            uris = (f"{server.uri}/{secrets.token_hex(4)}" for _ in itertools.count())
            ways[f"{OURS}, S3"] = lambda: _of_ours(
                next(uris), "zstd", rollout, trainer, server.cpu_s
            )
        rounds_of: dict[str, list[Once]] = {name: [] for name in ways}
        for number in range(rounds):  # in turn, so that a disturbance affects all formats
            for name, once in ways.items():
                rounds_of[name].append(once())
                if number == 0:
                    same_sets(name, trainer.call("digests"), expected)
                trainer.call("forget")
    return {name: min(of_way, key=lambda o: o.seconds) for name, of_way in rounds_of.items()}


def _of_peer(
    name: str, rollout: Party, trainer: Party, hosts: link.Hosts, gbit: int | None
) -> Once:
    rollout.start("serve", name, hosts.rollout.address)
    served = rollout.finish()
    port, pieces, shape_LK = served.result
    began = time.perf_counter()
    trainer.start("receive", name, hosts.rollout.address, port, pieces, shape_LK)
    rollout.start("send", gbit is None)
    rollout.finish()
    received = trainer.finish()
    rollout.start("close")
    closed = rollout.finish()
    cpu_s = closed.total_cpu_s - served.total_cpu_s + received.cpu_s
    return Once(received.ended - began, cpu_s, closed.result)


def _in_folder(rollout: Party, trainer: Party, compression: Compression) -> Once:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=FOLDER) as scratch:
        return _of_ours(scratch, compression, rollout, trainer, lambda: 0.0)


def _of_ours(
    uri: str,
    compression: Compression,
    rollout: Party,
    trainer: Party,
    server_cpu_s: Callable[[], float],
) -> Once:
    ids, server_began_s = rollout.call("ids"), server_cpu_s()
    began = time.perf_counter()
    rollout.start("write", uri, compression)
    trainer.start("read", uri, ids)
    written, read = rollout.finish(), trainer.finish()
    cpu_s = written.cpu_s + read.cpu_s + server_cpu_s() - server_began_s
    return Once(read.ended - began, cpu_s, written.result)


def table_of(found: Found, tokens: int) -> Table:
    """Return the table of seconds per million tokens, for each format and link."""
    scale = 1e6 / tokens
    names = list(dict.fromkeys(itertools.chain.from_iterable(found.values())))
    rows = []
    for name in names:
        here = [ways.get(name) for ways in found.values()]
        sent = next(once.sent for once in here if once)
        cells = [
            f"{once.seconds * scale:.2f} ({once.cpu_s * scale:.1f})" if once else ""
            for once in here
        ]
        rows.append((name, f"{sent * scale / 1e6:,.0f}", *cells))
    links = tuple(f"{name}: s (CPU s)" for name in found)
    return Table(("1 M tokens x 48 layers", "MB sent", *links), tuple(rows))


def goals_of(found: Found) -> Table:
    """Return the table of Retrace's goals relative to the fastest other format on each link."""
    rows = []
    for name, ways in found.items():
        peers = {peer.name: ways[peer.name].seconds for peer in OVERLAPPED}
        fastest = min(peers, key=peers.__getitem__)
        for own in (way for way in ways if way.startswith(OURS)):
            ratio = peers[fastest] / ways[own].seconds
            least = {"loopback": 1.0, "1 Gbit/s": FASTER}.get(name)
            limit = f">= {least:g}x" if least else "none"
            fewer = ways[own].sent < ways[fastest].sent
            met = verdict(ratio >= least and fewer) if least else ""
            floor = ways[own].cpu_s / 2 / ways[own].seconds
            rows.append((name, fastest, own, f"{ratio:.2f}x", limit, met, f"{floor:.0%}"))
    headers = ("link", "fastest peer", "", "speed ratio", "goal", "", "two cores busy")
    return Table(headers, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gbit", type=int, action="append", help="default: 10 and 1")
    arguments = arguments_of(parser)
    quick, refused = arguments.quick, link.why_not()
    tokens, rounds = (32_768, 1) if quick else (arguments.tokens, arguments.rounds)
    limited = [] if refused else arguments.gbit or ([1] if quick else [10, 1])
    found = {"loopback": at_link(None, tokens, SHARDS, rounds)}
    for gbit in limited:
        found[f"{gbit} Gbit/s"] = at_link(gbit, tokens, SHARDS, rounds)
    where = machine("numpy", "pyarrow", "torch", "orjson", "pybase64", "boto3")
    notes = [f"Left out: {refused}."] if refused else []
    publish(
        {
            "handover": block(table_of(found, tokens), *notes, where),
            "handover-goals": block(goals_of(found)),
        },
        arguments,
    )


if __name__ == "__main__":
    main()
