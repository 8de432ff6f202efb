"""Measure the gain from threads: write and read a step on one core and on all cores.

    python -m benchmarks.cores [--tokens N]

The program writes the recorded routes, widened to 48 layers, into a folder as one shard with
digests and a commit. It then seals, reads and checks the step. One process does this on one core,
and a second process on all cores. The fastest of several rounds counts, because other programs can
only make a round slower. Times are wall-clock times. MB means megabytes of raw routes.
"""

import argparse
import os
import time
from tempfile import TemporaryDirectory

from benchmarks.measure import in_fresh_process, machine
from benchmarks.page import Table, arguments_of, block, publish
from benchmarks.routes.recordings import recorded, widened
from benchmarks.traces import FOLDER, LAYERS
from benchmarks.ways import ours
from pipeline.store import open_store

HEADERS = ("MB/s by the clock (processor seconds)", "1 core", "all cores", "gain")


def timed(tokens: int, cores: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Measure writing and reading on a given number of cores.

    Args:
        tokens: Number of tokens to write.
        cores: Number of cores that this process may use.
        rounds: Number of rounds; the fastest counts.

    Returns:
        Wall-clock MB/s and processor seconds, keyed by kind of work.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-cores:])
    wide = widened(recorded(), LAYERS, tokens)
    samples, geometry = ours.samples_of(wide), ours.geometry_of(wide)
    ids = [sample.id for sample in samples]
    written, read = [], []
    for _ in range(rounds):
        with TemporaryDirectory(dir=FOLDER) as scratch:
            store = open_store(scratch)
            written.append(_timed(lambda s=store: ours.write(s, samples, geometry)))
            read.append(_timed(lambda s=store: ours.seal_and_read(s, ids)))
    mega = wide.raw_bytes / 1e6
    best = {"written, digests and commit": min(written), "sealed, read and checked": min(read)}
    return {name: (mega / seconds, cpu_s) for name, (seconds, cpu_s) in best.items()}


def _timed(work: object) -> tuple[float, float]:
    assert callable(work)
    began, cpu_began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu_began


def table_of(one: dict[str, tuple[float, float]], many: dict[str, tuple[float, float]]) -> Table:
    """Return the table that compares both results, with a row for each kind of work."""
    rows = []
    for name in one:
        (slow, slow_cpu_s), (fast, fast_cpu_s) = one[name], many[name]
        cells = (f"{slow:,.0f} ({slow_cpu_s:.2f} s)", f"{fast:,.0f} ({fast_cpu_s:.2f} s)")
        rows.append((name, *cells, f"{fast / slow:.2f}x"))
    return Table(HEADERS, tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=262_144)
    arguments = arguments_of(parser)
    FOLDER.mkdir(parents=True, exist_ok=True)
    tokens, rounds = (4096, 1) if arguments.quick else (arguments.tokens, 5)
    cores = len(os.sched_getaffinity(0))
    one, many = (in_fresh_process(timed, tokens, n, rounds).result for n in (1, cores))
    publish({"cores": block(table_of(one, many), machine("numpy", "pyarrow"))}, arguments)


if __name__ == "__main__":
    main()
