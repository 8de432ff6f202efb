"""Retrace's ways to store routes: only a routes file, or complete shards."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.routes.recordings import Recording
from pipeline.run import keys
from pipeline.run.commit import new_write_id
from pipeline.run.wait import wait_for_any
from pipeline.store import Store
from pipeline.traces import (
    Compression,
    Geometry,
    Manifest,
    Provenance,
    Routes,
    Sample,
    check_shard,
    new_sample,
    open_shard,
    read_manifest,
    read_routes,
    seal,
    write_shard,
)
from pipeline.traces.format.header import TraceFile
from pipeline.traces.format.parquet import open_file
from pipeline.traces.read.reader import RoutesFile
from pipeline.traces.write.rows import RoutesWriter
from pipeline.traces.write.writer import stored_routes

PROVENANCE = Provenance("R3", 0, "benchmark")
READERS = 2
"""Number of shards read in parallel: one is fetched while another is decoded."""


def geometry_of(recording: Recording) -> Geometry:
    """Return the recording's geometry; all its layers are MoE layers."""
    return Geometry(recording.experts, recording.topk, tuple(range(recording.layers)))


def samples_of(recording: Recording) -> list[Sample]:
    """Return samples with the recording's routes, and with random tokens and log-probs."""
    rng = np.random.default_rng(0)
    prompts: dict[int, npt.NDArray[np.uint32]] = {}
    seen: dict[int, int] = {}
    samples = []
    for routes_TLK, P, group in zip(
        recording.routes, recording.prompts, recording.groups, strict=True
    ):
        G = len(routes_TLK) + 1 - P
        k = seen[group] = seen.get(group, -1) + 1
        prompt = prompts.setdefault(group, rng.integers(0, 150_000, P, np.uint32))
        response_G, logprobs_G = rng.integers(0, 150_000, G, np.uint32), -rng.random(G, np.float32)
        samples.append(
            new_sample(
                *(0, str(group), k, prompt, response_G, routes_TLK),
                logprobs=logprobs_G,
                reward=float(k % 2),
                seed=len(samples),
            )
        )
    return samples


@dataclass(frozen=True)
class RoutesInFile:
    """A routes file that does not belong to a shard."""

    store: Store
    file: TraceFile
    geometry: Geometry
    lengths: tuple[int, ...]
    """Rows of each sample."""


def encode_file(store: Store, samples: Sequence[Sample], geometry: Geometry) -> RoutesInFile:
    """Check, sort and compress samples' routes into a new routes file of a store."""
    key = keys.rollout_file(0, 0, new_write_id(), "routes")
    lengths = []
    writer = RoutesWriter(store, key, {}, geometry, PROVENANCE)
    with writer.file:
        for sample in samples:
            rows = len(sample.tokens_S) - 1
            writer.add(sample.id, stored_routes(sample.id, sample.routes, geometry, rows), 0, rows)
            lengths.append(rows)
        return RoutesInFile(store, writer.finish(), geometry, tuple(lengths))


def decode_file(written: RoutesInFile) -> list[npt.NDArray[Any]]:
    """Return the array [T, L, K] of each sample, after checking all pages."""
    opened = open_file(written.store, written.file)
    parts = RoutesFile(opened, written.geometry, slice(None)).read(range(opened.row_groups))
    sets_LNK = np.concatenate([part.sets_LNK for part in parts.values()], axis=1)
    ends = np.cumsum(written.lengths)[:-1]
    return [sets_LTK.swapaxes(0, 1) for sets_LTK in np.split(sets_LNK, ends, axis=1)]


def write(
    store: Store,
    samples: Sequence[Sample],
    geometry: Geometry,
    shard: int = 0,
    compression: Compression = "zstd",
) -> dict[str, int]:
    """Write and commit samples as a shard of step 0.

    Args:
        store: The run's store.
        samples: Samples of the shard.
        geometry: Geometry of the routes.
        shard: Number of the shard.
        compression: Compression of the routes.

    Returns:
        Sizes in bytes of the shard's files, keyed by role.
    """
    done = write_shard(
        store, 0, shard, new_write_id(), samples, geometry, PROVENANCE, compression=compression
    )
    return {file["role"]: int(file["size"]) for file in done.body["files"]}


def seal_and_read(store: Store, ids: Sequence[str]) -> list[npt.NDArray[Any]]:
    """Seal step 0 and read all routes with all checks, as the flow and the trainer do."""
    seal(store, 0, 1, lambda _shard: ids, 0)
    found = read_routes(store, read_manifest(store, 0), ids)
    return [found[id].sets_TLK for id in ids]


def read_ahead(store: Store, ids: Sequence[Sequence[str]]) -> dict[str, npt.NDArray[Any]]:
    """Read step 0 while another process writes it.

    The function fetches each shard as soon as it is committed, and compares the decoded routes with
    the shard's digests. It then seals the step and compares each shard with the sealed step.

    Args:
        store: The run's store.
        ids: Sample ids of each shard, as the step's plan lists them.

    Returns:
        Sets [T, L, K], keyed by sample id.
    """

    def early(shard: int) -> tuple[Manifest, dict[str, Routes]]:
        wait_for_any(store, [keys.rollout(0, shard)], 600, "the rollout process")
        manifest = open_shard(store, 0, shard)
        return manifest, read_routes(store, manifest, manifest.ids)

    with ThreadPoolExecutor(READERS) as threads:
        shards = list(threads.map(early, range(len(ids))))
    sealed = seal(store, 0, len(ids), ids.__getitem__, 0).all()
    return {
        id: routes[id].sets_TLK for shard, routes in shards for id in check_shard(sealed, shard)
    }
