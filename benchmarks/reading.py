"""Measure how a training rank reads its routes: bytes, throughput and waiting time.

One rank of DP 8 x PP 4 (12 of 48 MoE layers, top-8 of 128 experts) reads its share of a sealed step
through the trainer's `load_step`. Groups have 8 samples of 8,192 tokens; a quarter of the tokens
belong to a shared prompt. There are four mini-batches, and each micro-batch has one sample. The
routes are taken from a recording (benchmarks/data), which is repeated with different expert
numbers.

    bytes      Fetched bytes, divided by the bytes that the rank needs: its own rows in its layers,
               plus the footers.
    plain GET  GETs of the same column chunks, sent one at a time; adjacent chunks are merged.
    fetched    Reads of the same column chunks with Store.read_ranges, without checks.
    arrays     Checking and decoding into the trainer's arrays, in MB/s of raw uint8 ids, which take
               up about 4 times as many bytes as the compressed ones.
    waits      Seconds that the trainer waits from the seal to the end of the first pass (manifest,
               layout, samples, routes), as a share of the step. Sleeps replace computation.

The compute model: Qwen3-30B-A3B has 3.3 B active parameters, so a log-prob pass needs 6.6 GFLOP per
token and an update 19.8. At 40% of its peak, a data-parallel rank of four H100s (989 TFLOP/s in
bf16 each) processes 240,000 tokens/s in the log-prob pass and 80,000 in the update. "5 x" means a
machine that is five times as fast.
"""

import argparse
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.measure import machine
from benchmarks.minio import places
from benchmarks.page import Table, arguments_of, block, publish
from benchmarks.routes.recordings import Recording, recorded, widened
from operators.training.batches.step_data import StepData, layout_rules, load_step
from pipeline.config.tree import RunConfig
from pipeline.run.commit import new_write_id
from pipeline.store import Store, open_store
from pipeline.traces import (
    Geometry,
    Manifest,
    Provenance,
    Sample,
    SealedManifest,
    ShardWriter,
    new_sample,
    open_manifest,
    read_routes,
    seal,
)
from pipeline.traces.read.reader import ROUTES_OF, Place, groups_of, open_routes

WHOLE = Geometry(experts=128, topk=8, layers=tuple(range(48)))
STAGE = Geometry(experts=128, topk=8, layers=tuple(range(12, 24)))
TOKENS, PROMPT, N = 8192, 2048, 8
DATA_PARALLEL, SHARDS = 8, 4
LOGPROB_RATE, UPDATE_RATE = 240_000, 80_000
HEADERS = (
    "store",
    "bytes / own",
    "plain GETs",
    "fetched / plain",
    "arrays",
    "waits",
    "waits, 5 x",
)


def config(groups: int) -> RunConfig:
    """Return settings of a run that replays the engine's routes in four mini-batches per step."""
    actor = {
        "ppo_mini_batch_size": -(-groups // 4),
        "ppo_micro_batch_size_per_gpu": 1,
        "router_replay": {"mode": "R3"},
    }
    return RunConfig.model_validate(
        {
            "data": {},
            "actor_rollout_ref": {"model": {"path": "none"}, "actor": actor, "rollout": {"n": N}},
            "trainer": {"experiment_name": "benchmark"},
        }
    )


def write_step(store: Store, groups: int) -> SealedManifest:
    """Write and seal a step; prompt i belongs to shard i mod 4, as in a run's plan."""
    rng = np.random.default_rng(0)
    pool = widened(recorded(), len(WHOLE.layers), 4 * TOKENS)
    provenance = Provenance("R3", 0, "recorded")
    ids: list[list[str]] = [[] for _ in range(SHARDS)]
    for shard in range(SHARDS):
        with ShardWriter(store, 0, shard, new_write_id(), WHOLE, provenance, N) as writer:
            for row in range(shard, groups, SHARDS):
                for sample in group_of(row, pool, rng):
                    writer.add(sample)
                    ids[shard].append(sample.id)
            writer.commit()
    return seal(store, 0, SHARDS, ids.__getitem__, 0)


def group_of(row: int, pool: Recording, rng: np.random.Generator) -> Iterator[Sample]:
    """Yield the samples of one prompt; they share the prompt's rows.

    Args:
        row: Number of the prompt.
        pool: Recording to take routes from.
        rng: Source of the tokens and of the random choice of routes.
    """
    prompt_P = rng.integers(0, 151_936, PROMPT)
    of_prompt = some_rows(PROMPT, pool, rng)
    for k in range(N):
        G = TOKENS - PROMPT
        response_G, logprobs_G = rng.integers(0, 151_936, G), -rng.exponential(0.5, G)
        sets_TLK = np.concatenate([of_prompt, some_rows(G, pool, rng)])[: TOKENS - 1]
        yield new_sample(
            *(0, str(row), k, prompt_P, response_G, sets_TLK),
            logprobs=logprobs_G,
            reward=float(rng.random()),
        )


def some_rows(rows: int, pool: Recording, rng: np.random.Generator) -> np.ndarray:
    """Return routes [rows, 48, 8]: pieces of the recording with different expert numbers.

    Args:
        rows: Number of rows.
        pool: Recording to take the pieces from.
        rng: Source of the random choice of pieces and numbers.
    """
    pieces = [pool.routes[i] for i in rng.integers(0, len(pool.routes), -(-rows // 512))]
    flipped = rng.integers(0, WHOLE.experts, (len(WHOLE.layers), 1)).astype(np.uint8)
    return np.concatenate(pieces)[:rows] ^ flipped


@dataclass(frozen=True)
class Slice:
    """The column chunks that a rank reads from one file."""

    key: str
    ranges: list[tuple[int, int]]
    """Offset and length in bytes of each column chunk."""
    needed_bytes: float
    """Size in bytes of the rank's own rows, estimated from their share of each row group."""
    footer_bytes: int


def slices_of(store: Store, manifest: Manifest) -> list[Slice]:
    """Return the column chunks that the rank reads, for each file."""
    rows = manifest.rows.select(ROUTES_OF).to_pylist()
    files = open_routes(store, manifest, rows, STAGE.layers)
    needed: Counter[Place] = Counter()
    for row in rows:
        needed.update(groups_of(row, files))
    found = []
    for number, file in files.items():
        mine = {group: count for (at, group), count in needed.items() if at == number}
        sizes = np.diff(file.opened.first_rows)
        own = sum(file.bytes_of(group) * count / sizes[group] for group, count in mine.items())
        ranges = file.opened.ranges(file.schema.names, sorted(mine))
        found.append(Slice(file.opened.key, ranges, own, manifest.files[number].footer_size))
    return found


def plain(store: Store, slices: list[Slice]) -> float:
    """Merge adjacent ranges, send their GETs one at a time, and return the seconds."""
    merged: list[tuple[str, int, int]] = []
    for one in slices:
        for offset, length in sorted(one.ranges):
            key, start, end = merged[-1] if merged else ("", 0, 0)
            if (key, end) == (one.key, offset):
                merged[-1] = key, start, offset + length
            else:
                merged.append((one.key, offset, offset + length))
    began = time.perf_counter()
    for key, start, end in merged:
        store.read_range(key, start, end - start)
    return time.perf_counter() - began


def fetched(store: Store, slices: list[Slice]) -> float:
    """Return the wall-clock seconds of the store's parallel reads, 256 column chunks at a time."""
    began = time.perf_counter()
    for one in slices:
        for start in range(0, len(one.ranges), 256):
            store.read_ranges(one.key, one.ranges[start : start + 256])
    return time.perf_counter() - began


def loaded(store: Store, sealed: SealedManifest, settings: RunConfig, rank: int) -> StepData:
    """Load the step as the trainer does.

    Args:
        store: The run's store.
        sealed: The step's manifest.
        settings: Settings of the run.
        rank: Data-parallel rank.
    """
    rules = layout_rules(settings, DATA_PARALLEL)
    return load_step(store, sealed, settings, rules, rank, STAGE)


def trained(
    store: Store, settings: RunConfig, rank: int, faster: float
) -> tuple[float, float, StepData]:
    """Read a step as the trainer does, with sleeps in place of computation.

    Args:
        store: The run's store.
        settings: Settings of the run.
        rank: Data-parallel rank.
        faster: Speed of the simulated machine relative to the compute model.

    Returns:
        Seconds spent waiting, seconds of the step, and the step's data.
    """
    began = time.perf_counter()
    data = loaded(store, open_manifest(store, 0), settings, rank)
    waited = time.perf_counter() - began
    for rate in (LOGPROB_RATE, UPDATE_RATE):
        for mini_batch in data.layout.mini_batches:
            for micro_batch in mini_batch.shares[rank]:
                began_waiting = time.perf_counter()
                ids = [data.ids[row] for row in micro_batch.rows]
                tokens = sum(
                    len(data.samples[id].tokens_S)
                    for id in ids
                    if data.routes is not None and data.routes[id]
                )
                waited += time.perf_counter() - began_waiting
                time.sleep(tokens / rate / faster)
    data.close()
    return waited, time.perf_counter() - began, data


def measure(uri: str, groups: int, rounds: int) -> tuple[str, ...]:
    """Measure one store and return its row of the table.

    Args:
        uri: URI of an empty store.
        groups: Number of prompts of the step.
        rounds: Number of rounds; the fastest counts.
    """
    store = open_store(uri)
    sealed = write_step(store, groups)
    settings, rank = config(groups), DATA_PARALLEL // 2
    data = loaded(store, sealed, settings, rank)
    rows = sum(len(routes.valid_T) for routes in (data.routes or {}).values())
    slices = slices_of(store, data.manifest)
    size = sum(length for one in slices for _, length in one.ranges)
    footers = sum(one.footer_bytes for one in slices)
    needed = sum(one.needed_bytes for one in slices) + footers
    stream_bytes = getattr(data.routes, "fetched_bytes", 0) + footers
    data.close()
    seconds: dict[str, list[float]] = {"plain": [], "fetched": [], "arrays": []}
    for _ in range(rounds):  # in turn, so that a disturbance affects all measurements
        seconds["plain"].append(plain(store, slices))
        seconds["fetched"].append(fetched(store, slices))
        began = time.perf_counter()
        read_routes(store, data.manifest, data.manifest.ids, STAGE.layers)
        seconds["arrays"].append(time.perf_counter() - began)
    best = {name: min(times) for name, times in seconds.items()}
    raw = rows * len(STAGE.layers) * STAGE.topk
    shares = []
    for faster in (1.0, 5.0):
        waited, step_s, _ = trained(store, settings, rank, faster)
        shares.append(f"{waited / step_s:.2%} ({waited * 1e3:.0f} ms of {step_s:.1f} s)")
    return (
        "s3 (MinIO)" if "://" in uri else "file",
        f"{stream_bytes / needed:.3f}",
        f"{size / best['plain'] / 1e6:.0f} MB/s",
        f"{best['plain'] / best['fetched']:.2f}",
        f"{raw / best['arrays'] / 1e6:.0f} MB/s",
        *shares,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", action="append", help="URI; may be repeated")
    parser.add_argument("--groups", type=int, default=96, help="prompts of the step")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = arguments_of(parser)
    groups, rounds = (8, 1) if arguments.quick else (arguments.groups, arguments.rounds)
    samples = groups * N
    title = (
        f"{samples} samples of {TOKENS:,} tokens; a rank reads {samples // DATA_PARALLEL} of them, "
        f"{len(STAGE.layers)} of {len(WHOLE.layers)} layers:"
    )
    with places(arguments.store) as uris:
        table = Table(HEADERS, tuple(measure(uri, groups, rounds) for uri in uris))
    where = machine("numpy", "pyarrow", "boto3")
    publish({"reading": block(title, table, where)}, arguments)


if __name__ == "__main__":
    main()
