"""The trace format: which experts the router chose, for each token of a sample and MoE layer.

Specification: docs/trace-format.md; use as a library: docs/library.md. This package may import
pipeline.store and nothing else of ours; it holds arrays in numpy and files in Parquet, and needs no
engine, scheduler or tokenizer.

    library  samples from plain arrays, a step in one call
    writer   shards of rollout workers, R2 routes of trainers   ─►  data files + commit
    seal     joins a step's shards                              ─►  sealed manifest
    manifest columns and rows of a sealed step                  ◄─  checked ranges
    reader   samples, and slices of routes by sample and layer  ◄─  checked ranges
    record   copies a sealed step to a record set and back
    peers    routes as other trainers hold them
"""

from pipeline.traces.digests import routes_digest, token_digest
from pipeline.traces.ids import (
    expected_ids,
    group_id,
    prompt_id,
    sample_id,
    sampling_seed,
    shard_ids,
    validation_id,
)
from pipeline.traces.library import new_sample, write_step
from pipeline.traces.manifest import Manifest, SealedManifest, open_manifest, read_manifest
from pipeline.traces.peers import dense_routes, to_slime, to_verl, to_verl_batch
from pipeline.traces.reader import read_routes, read_sample_file, read_samples
from pipeline.traces.record import (
    Expected,
    check_replay,
    expected_of,
    seal_replay,
    write_record_set,
)
from pipeline.traces.records import (
    Geometry,
    Kind,
    Provenance,
    Routes,
    Sample,
    TraceError,
    VersionSpan,
)
from pipeline.traces.seal import seal
from pipeline.traces.stream import RouteStream, SampleStream
from pipeline.traces.training import used_routes
from pipeline.traces.writer import (
    ShardWriter,
    write_samples,
    write_shard,
    write_training_routes,
)

__all__ = [
    "Expected",
    "Geometry",
    "Kind",
    "Manifest",
    "Provenance",
    "RouteStream",
    "Routes",
    "Sample",
    "SampleStream",
    "SealedManifest",
    "ShardWriter",
    "TraceError",
    "VersionSpan",
    "check_replay",
    "dense_routes",
    "expected_ids",
    "expected_of",
    "group_id",
    "new_sample",
    "open_manifest",
    "prompt_id",
    "read_manifest",
    "read_routes",
    "read_sample_file",
    "read_samples",
    "routes_digest",
    "sample_id",
    "sampling_seed",
    "seal",
    "seal_replay",
    "shard_ids",
    "to_slime",
    "to_verl",
    "to_verl_batch",
    "token_digest",
    "used_routes",
    "validation_id",
    "write_record_set",
    "write_samples",
    "write_shard",
    "write_step",
    "write_training_routes",
]
