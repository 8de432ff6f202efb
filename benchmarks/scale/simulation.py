"""Simulate a thousand workers and ranks of one run against one MinIO server, in simulated time.

    python -m benchmarks.scale.simulation [--workers 500] [--ranks 500] [--write]

The store's code, plans, shards, seals, the flow's tasks and all requests are real. Sleeps replace
engines and models. Time is simulated (clock.py): a request takes the time that the coefficient
`request_s` gives, computation takes the processor time that it uses, and the rest is waiting.
`--write` writes the result to coefficients.json, from which the tables in benchmarks/scale.md are
generated.

The results:

    requests per simulated second: the mean for each kind and party, and the maximum for each kind.
    lags: the times between events, such as from the last shard to the seal.
    the flow's memory and processor time for a step with the same number of shards, in a separate
    process.
"""

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

from benchmarks.measure import Phase, in_fresh_process, machine
from benchmarks.minio import own_minio
from benchmarks.scale.clock import Clock
from benchmarks.scale.coefficients import FILE, read, write_part
from benchmarks.scale.counted import Requests, counted
from benchmarks.scale.parties import TENSOR_PARALLEL, Lags, Run, Size, context_of
from pipeline.flows.steps import rollout
from pipeline.run import keys, shares, wait
from pipeline.run.attempts import attempt_of
from pipeline.store import open_store
from pipeline.traces.format import parquet
from pipeline.traces.write import seal as sealing

SIZE = Size(
    workers=500, ranks=500, groups=1000, n=2, steps=2, staleness=1, rollout_s=20.0, train_s=10.0
)
KINDS = ("HEAD", "GET", "PUT", "LIST")
PARTIES = ("worker", "rank", "flow")


def simulate(size: Size, uri: str, request_s: float) -> tuple[Run, Requests]:
    """Simulate a run until it ends.

    Args:
        size: Size of the run.
        uri: URI of an empty s3:// store.
        request_s: Simulated duration of a request, in seconds.

    Returns:
        The run, with its lags, and the counts of its requests.
    """
    clock = Clock()
    store, requests = counted(uri, clock, request_s, lambda: clock.party)
    run = Run(size, store, clock)
    clock.add("start", run.begin)
    with ExitStack() as patched:
        for module in (wait, shares):
            patched.enter_context(patch.object(module, "time", clock))
        for module in (wait, shares, sealing):
            patched.enter_context(patch.object(module, "in_order", clock.in_order))
        # The shards are tiny, but their files are read with as many requests as large ones.
        patched.enter_context(patch.object(parquet, "_SMALL", 0))
        clock.run()
    return run, requests


def flow_alone(size: Size, uri: str, step: int) -> int:
    """Run the flow's rollout task for a step whose shards already exist; return its peak memory.

    Args:
        size: Size of the run.
        uri: URI of the run's store.
        step: Step to seal.

    Returns:
        Peak resident memory in bytes.
    """
    store = open_store(uri)
    context = context_of(size.config, store, attempt_of(size.config, 0))
    rollout.fn(context, step)
    return peak_bytes()


def peak_bytes() -> int:
    """Return this process's peak resident memory; getrusage might return its parent's."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def result_of(
    run: Run, requests: Requests, flow: Phase, idle: Phase, real_s: float, size: Size
) -> dict[str, Any]:
    """Return the simulation's result in the form in which coefficients.json stores it.

    Args:
        run: The simulated run.
        requests: Counts of its requests.
        flow: Measurement of the flow's task in a separate process.
        idle: Measurement of a process that only imports the modules.
        real_s: Duration of the simulation in wall-clock seconds.
        size: Size of the run.
    """
    lags, last, simulated_s = run.lags, size.steps - 1, run.clock.now
    return {
        "size": asdict(size),
        "simulated_s": round(simulated_s, 1),
        "real_s": round(real_s, 1),
        "requests": {
            party: {kind: requests.total(party=party, kind=kind) for kind in KINDS}
            for party in PARTIES
        },
        "peaks": {kind: requests.peak(kind=kind) for kind in KINDS},
        "by_folder": {
            folder: sum(requests.total(folder=folder, kind=kind) for kind in KINDS)
            for folder in ("steps", "policies", "attempts", "amendments")
        },
        "samples_of_rank": size.groups * size.n // (size.ranks // TENSOR_PARALLEL),
        "shards_of_rank": max(lags.touched),
        "lags": lags_of(lags, last),
        "flow": {
            "shards": size.workers,
            "seconds": round(flow.seconds, 2),
            "cpu_s": round(flow.cpu_s, 2),
            "peak_bytes": flow.result,
            "imports_bytes": idle.result,
        },
    }


def lags_of(lags: Lags, last: int) -> dict[str, float]:
    """Return the lags of the last step in seconds, keyed by name."""
    found = {
        "last_shard_to_seal": lags.seal_s(last),
        "seal_to_trainer": lags.found[last] - lags.sealed[last],
        "share_read": max(lags.read[last]),
        "shares_to_policy": lags.policy[last + 1] - lags.exported[last + 1],
        "worker_start_median": statistics.median(lags.began[last]),
        "worker_start_last": max(lags.began[last]),
        "metrics_to_flow": lags.noticed[last] - lags.policy[last + 1],
    }
    return {name: round(seconds, 3) for name, seconds in found.items()}


def measure(size: Size, uri: str) -> dict[str, Any]:
    """Simulate a run on an empty store, and measure the flow in a separate process."""
    began = time.monotonic()
    run, requests = simulate(size, uri, read().assumed["request_s"])
    real_s = time.monotonic() - began
    last = size.steps - 1
    run.store.delete(keys.manifest(last))
    flow = in_fresh_process(flow_alone, size, uri, last)
    idle = in_fresh_process(peak_bytes)
    return result_of(run, requests, flow, idle, real_s, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--workers", type=int, default=SIZE.workers)
    parser.add_argument("--ranks", type=int, default=SIZE.ranks)
    parser.add_argument("--steps", type=int, default=SIZE.steps)
    parser.add_argument("--write", action="store_true", help=f"write the result into {FILE.name}")
    arguments = parser.parse_args()
    size = replace(
        SIZE,
        workers=arguments.workers,
        ranks=arguments.ranks,
        steps=arguments.steps,
        groups=2 * arguments.workers,
    )
    with tempfile.TemporaryDirectory(), own_minio() as server:
        found = measure(size, f"{server.uri}/simulated")
    found["machine"] = machine("boto3", "pyarrow")
    for name, value in found.items():
        print(f"{name}: {value}")
    if arguments.write:
        write_part("simulation", found)


if __name__ == "__main__":
    main()
