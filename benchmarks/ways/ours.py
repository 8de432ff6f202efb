"""Retrace's ways to store routes: only the coding, only a routes file, or complete shards."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self

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
    VersionSpan,
    check_shard,
    open_shard,
    read_manifest,
    read_routes,
    seal,
    write_shard,
)
from pipeline.traces.format.chunks import TraceFile
from pipeline.traces.format.codec import canonical, checked, decode_segments, gaps, pack
from pipeline.traces.read.parts import read_part
from pipeline.traces.read.slices import Slices
from pipeline.traces.write.routes_file import RoutesFile
from pipeline.traces.write.segments import SegmentRef, SegmentWriter

PROVENANCE = Provenance("R3", 0, "benchmark")
LEVEL = 1
"""The zstd level that the writer uses."""
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
        samples.append(
            Sample(
                id=f"000000/{group}/{k}",
                group=f"000000/{group}",
                prompt_id=str(group),
                prompt_tokens_P=prompt,
                response_tokens_G=rng.integers(0, 150_000, G, np.uint32),
                loss_mask_G=np.ones(G, np.bool_),
                logprobs_G=-rng.random(G, np.float32),
                finish_reason="stop",
                version_spans=(VersionSpan(0, 0, G),),
                seed=len(samples),
                reward=float(k % 2),
                reward_error=None,
                extras={},
                routes=Routes(routes_TLK, np.ones(len(routes_TLK), np.bool_)),
            )
        )
    return samples


def encode_bare(recording: Recording) -> list[npt.NDArray[np.uint8]]:
    """Sort the sets of every sample and code them as gaps, without compressing or writing them."""
    return [
        pack(gaps(checked(np.ascontiguousarray(routes_TLK.swapaxes(0, 1)), recording.experts)))
        for routes_TLK in recording.routes
    ]


def decode_bare(
    coded: Sequence[npt.NDArray[np.uint8]], recording: Recording
) -> list[npt.NDArray[Any]]:
    """Decode the sets [T, L, K] of every sample, layer by layer, as the reader does."""
    lengths = [len(routes_TLK) for routes_TLK in recording.routes]
    ends = np.cumsum([0, *lengths])
    layers = [
        decode_segments(
            [memoryview(c[i]) for c in coded], lengths, recording.topk, recording.experts
        )
        for i in range(recording.layers)
    ]
    sets_LNK = np.stack(layers)
    return [sets_LNK[:, i:j].swapaxes(0, 1) for i, j in itertools.pairwise(ends)]


@dataclass
class MemoryStore:
    """A store in memory, with only the methods that a trace file needs."""

    uri: str = "memory"
    objects: dict[str, bytes] = field(default_factory=dict)

    def upload(self, key: str) -> "_MemoryUpload":
        """See Store.upload."""
        return _MemoryUpload(self, key)

    def read_ranges(
        self, key: str, ranges: Sequence[tuple[int, int]], size: int | None = None
    ) -> list[bytes]:
        """See Store.read_ranges."""
        data = self.objects[key]
        return [data[offset : offset + length] for offset, length in ranges]


@dataclass
class _MemoryUpload:
    store: MemoryStore
    key: str
    pieces: list[bytes] = field(default_factory=list)

    def write(self, data: bytes) -> int:
        self.pieces.append(bytes(data))
        return len(data)

    def finish(self) -> None:
        self.store.objects[self.key] = b"".join(self.pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


@dataclass(frozen=True)
class RoutesInMemory:
    """A routes file in memory that does not belong to a shard."""

    store: Any
    file: TraceFile
    geometry: Geometry
    places: Mapping[str, Sequence[SegmentRef]]
    """Segments by sample id."""


def encode_file(samples: Sequence[Sample], geometry: Geometry) -> RoutesInMemory:
    """Sort, code and compress samples' routes into a Parquet file, with a digest for each range.

    Each sample gets its own segments: the rows of a group's prompt are not shared.
    """
    store: Any = MemoryStore()
    places = {}
    with RoutesFile(store, "routes", geometry, PROVENANCE) as file:
        segments = SegmentWriter(file)
        for sample in samples:
            routes, rows = sample.routes, len(sample.tokens_S) - 1
            if routes is not None:
                routes = canonical(routes, geometry, rows)
                places[sample.id] = segments.add(sample.id, routes, 0, rows)
        segments.finish()
        return RoutesInMemory(store, file.finish(), geometry, places)


def decode_file(written: RoutesInMemory) -> Iterator[npt.NDArray[Any]]:
    """Yield the array [T, L, K] of each sample, checking all ranges and positions."""
    geometry = written.geometry
    segments = range(written.file.rows)
    part = read_part(written.store, written.file, geometry, geometry.layers, segments)
    rows = {
        id: {
            "group": "",  # no segment belongs to a group
            "branch_of": None,
            "part_digests": None,
            "prompt_length": 1,
            "rows_total": sum(place.tokens for place in places),
            "routes": [{"file": 0, "segments": [vars(place) for place in places]}],
        }
        for id, places in written.places.items()
    }
    slices = Slices(geometry, {0: part}, rows, whole=False)
    return (slices.joined(id).sets_TLK for id in rows)


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
