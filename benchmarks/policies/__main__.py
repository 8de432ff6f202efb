"""Measure three ways to send a policy from 4 training ranks to 4 rollout workers through MinIO.

    python -m benchmarks.policies [--gigabytes 1 4]

    serial        the former design: one rank writes files, digests them twice and uploads them;
                  workers fetch one file after the other (serial.py)
    whole         all ranks stream their parts; workers fetch files in parallel
    difference    all ranks code the changes since the previous version; workers patch their copies

Workers of one machine share a copy. `whole` and `difference` are therefore measured twice: with
workers that share a copy, and with a copy for each worker, as on four machines. In `serial`, each
worker always had its own copy.

Each rank and worker is a process. They and the server share this machine, whose cores and disk
limit all three ways. On separate machines, the speed-up over `serial` is therefore larger than
measured here. Workers always check the fetched data. Tensors start in the ranks' memory; weights.py
creates them.
"""

import argparse
import contextlib
import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import machine
from benchmarks.minio import Minio, own_minio
from benchmarks.page import Table, arguments_of, block, publish, verdict
from benchmarks.policies.parties import (
    RANKS,
    WORKERS,
    Spent,
    rank,
    serial_rank,
    serial_worker,
    worker,
)
from benchmarks.policies.weights import keep_pools
from pipeline.store import open_store

GOALS = {"whole": 2.0, "difference": 10.0}
"""Required speed-up over `serial`, keyed by way."""


@dataclass(frozen=True)
class Way:
    """Measurements of one way to send a policy."""

    ranks: list[Spent]
    workers: list[Spent]
    server_cpu_s: float

    @property
    def up_s(self) -> float:
        """Seconds from the first rank's start to the commit."""
        return _seconds(self.ranks)

    @property
    def down_s(self) -> float:
        """Seconds from the first worker's start until the last worker has the policy."""
        return _seconds(self.workers)

    @property
    def seconds(self) -> float:
        """Total seconds of upload and download."""
        return self.up_s + self.down_s


def _seconds(parties: Sequence[Spent]) -> float:
    return max(one.ended for one in parties) - min(one.began for one in parties)


def together(work: Callable[..., Spent], arguments: Sequence[tuple[Any, ...]]) -> list[Spent]:
    """Run a party in each of several processes, which begin at the same time."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        start = manager.Barrier(len(arguments))
        with ProcessPoolExecutor(len(arguments), context) as pool:
            running = [pool.submit(work, *of_one, start) for of_one in arguments]
            return [one.result() for one in running]


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """Yield a folder for the files that workers fetch."""
    with tempfile.TemporaryDirectory(prefix="retrace-bench-") as folder:
        yield folder


def measure(server: Minio, size: int) -> dict[str, Way]:
    """Measure all ways with policies of `size` bytes; return the results by name of the way."""
    uri = f"{server.uri}/{size}"
    found: dict[str, Way] = {}

    def report(name: str, way: Way) -> None:
        found[name] = way
        print(f"{size / 1e9:.1f} GB, {name}: {way.seconds:.1f} s", flush=True)

    def spend(work: Callable[..., Spent], arguments: Sequence[tuple[Any, ...]]) -> _Phase:
        before = server.cpu_s()
        return _Phase(together(work, arguments), server.cpu_s() - before)

    with _folder() as folder:
        up = spend(serial_rank, [(f"{uri}/serial", size, 0)])
        down = spend(serial_worker, [(f"{uri}/serial", 0, folder)] * WORKERS)
    report("serial", _way(up, down))
    _remove(f"{uri}/serial")
    for version, name in enumerate(GOALS):
        ranks = [(f"{uri}/whole", size, version, number, not version) for number in range(RANKS)]
        up = spend(rank, ranks)
        for machines in (WORKERS, 1):
            with _folder() as folder:
                copies = [f"{folder}/{number % machines}" for number in range(WORKERS)]
                down = spend(worker, [(f"{uri}/whole", version, copy) for copy in copies])
            report(f"{name}, {machines} machine{'s' * (machines > 1)}", _way(up, down))
    _remove(f"{uri}/whole")
    return found


@dataclass(frozen=True)
class _Phase:
    """The upload or the download of one way."""

    parties: list[Spent]
    server_cpu_s: float


def _way(up: _Phase, down: _Phase) -> Way:
    return Way(up.parties, down.parties, up.server_cpu_s + down.server_cpu_s)


def _remove(uri: str) -> None:
    store = open_store(uri)
    for info in list(store.list("")):
        store.delete(info.key)


def table_of(found: dict[int, dict[str, Way]]) -> Table:
    """Return the table of seconds, bytes and memory for each size and way."""
    rows = []
    for size, ways in found.items():
        rows.append((f"**{size / 1e9:.1f} GB**", *[""] * 10))
        for name, way in ways.items():
            parts = ", ".join(f"{part} {s:.1f}" for part, s in _parts(way).items())
            rows.append(
                (
                    name,
                    f"{way.up_s:.1f}",
                    f"{way.down_s:.1f}",
                    parts,
                    f"{sum(one.sent for one in way.ranks) / 1e6:,.0f}",
                    f"{sum(one.sent for one in way.workers) / 1e6:,.0f}",
                    f"{sum(one.cpu_s for one in (*way.ranks, *way.workers)):.1f}",
                    f"{way.server_cpu_s:.1f}",
                    f"{max(one.memory for one in way.ranks) / 1e6:,.0f}",
                    f"{max(one.memory for one in way.workers) / 1e6:,.0f}",
                    _speed(name, ways),
                )
            )
    headers = (
        *("", "up s", "down s", "rank's time by part, s", "MB up", "MB down", "CPU s"),
        *("server CPU s", "rank +MB", "worker +MB", "speed-up over serial"),
    )
    return Table(headers, tuple(rows))


def _parts(way: Way) -> dict[str, float]:
    names = dict.fromkeys(name for one in way.ranks for name in one.parts)
    return {name: max(one.parts.get(name, 0.0) for one in way.ranks) for name in names}


def _speed(name: str, ways: dict[str, Way]) -> str:
    times = ways["serial"].seconds / ways[name].seconds
    aim = GOALS.get(name.partition(",")[0])
    return f"{times:.1f}" + (f", goal {aim:.0f}: {verdict(times >= aim)}" if aim else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 4.0])
    arguments = arguments_of(parser)
    sizes = [64e6] if arguments.quick else [1e9 * number for number in arguments.gigabytes]
    if shutil.which("minio") is None:
        raise SystemExit("no `minio` on PATH: install it")
    with own_minio() as server, keep_pools():
        found = {int(size): measure(server, int(size)) for size in sizes}
    how = (
        f"{RANKS} ranks, {WORKERS} workers, one server; seconds by the clock. CPU s: ranks and "
        "workers together. Memory: in excess of the process's memory at the start."
    )
    line = machine("boto3", "numpy")
    publish({"policies": block(table_of(found), how, line)}, arguments)


if __name__ == "__main__":
    main()
