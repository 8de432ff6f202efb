"""Traces: the experts that the router chose for each token of a sample in each MoE layer.

docs/trace-format.md specifies the format: plain Parquet files, which commits in JSON join. Arrays
are numpy arrays. The package does not need an engine, scheduler or tokenizer.

    write.library:   creates samples from arrays, and writes a step in one call
    write.writer:    writes rollout workers' shards             ─►  data files + commit
    write.trainer:   writes the routes that a trainer recorded  ─►  data files + training.json
    write.seal:      joins a step's shards                      ─►  manifest.json + rows
    format.manifest: reads columns and rows of a sealed step
    read.reader:     reads samples, and routes for each sample and layer
    read.stream:     the same, ahead of a training rank
    read.trainer:    joins a step with the routes that its trainer recorded
    read.early:      reads shards before their step is sealed
    read.peers:      converts routes to the layouts of other trainers
"""

from pipeline.model.geometry import Geometry
from pipeline.traces.format.ids import (
    baseline_ids,
    expected_ids,
    group_id,
    planned_id,
    prompt_id,
    sample_id,
    sampling_seed,
    shard_ids,
    validation_id,
)
from pipeline.traces.format.manifest import Manifest, SealedManifest, open_manifest, read_manifest
from pipeline.traces.format.routes import token_digest
from pipeline.traces.format.types import Kind, Provenance, Routes, Sample, TraceError, VersionSpan
from pipeline.traces.read.early import check_shard, open_shard
from pipeline.traces.read.peers import dense_routes, to_slime, to_verl, to_verl_batch
from pipeline.traces.read.reader import read_routes, read_sample_file, read_samples
from pipeline.traces.read.stream import RouteStream, SampleStream
from pipeline.traces.read.trainer import used_routes
from pipeline.traces.write.files import Compression
from pipeline.traces.write.library import new_sample, write_step
from pipeline.traces.write.seal import seal
from pipeline.traces.write.trainer import (
    NewTrainerRoutes,
    seal_trainer_routes,
    write_trainer_routes,
)
from pipeline.traces.write.writer import ShardWriter, write_samples, write_shard

__all__ = [
    "Compression",
    "Geometry",
    "Kind",
    "Manifest",
    "NewTrainerRoutes",
    "Provenance",
    "RouteStream",
    "Routes",
    "Sample",
    "SampleStream",
    "SealedManifest",
    "ShardWriter",
    "TraceError",
    "VersionSpan",
    "baseline_ids",
    "check_shard",
    "dense_routes",
    "expected_ids",
    "group_id",
    "new_sample",
    "open_manifest",
    "open_shard",
    "planned_id",
    "prompt_id",
    "read_manifest",
    "read_routes",
    "read_sample_file",
    "read_samples",
    "sample_id",
    "sampling_seed",
    "seal",
    "seal_trainer_routes",
    "shard_ids",
    "to_slime",
    "to_verl",
    "to_verl_batch",
    "token_digest",
    "used_routes",
    "validation_id",
    "write_samples",
    "write_shard",
    "write_step",
    "write_trainer_routes",
]
