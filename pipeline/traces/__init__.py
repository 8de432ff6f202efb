"""Traces: the experts that the router chose for each token of a sample in each MoE layer.

docs/trace-format.md specifies the format. docs/library.md describes the library, `import retrace`.
Arrays are numpy arrays and files are Parquet files. The package does not need an engine,
scheduler or tokenizer.

    write.library:   creates samples from arrays, and writes a step in one call
    write.writer:    writes rollout workers' shards                      ─►  data files + commit
    write.training:  writes trainers' R2 routes                          ─►  data files + commit
    write.seal:      joins a step's shards                               ─►  sealed manifest
    format.manifest: reads columns and rows of a sealed step             ◄─  checked ranges
    read.reader:     reads samples, and routes for each sample and layer ◄─  checked ranges
    read.early:      reads shards before their step is sealed
    recorded_sets:   copies a sealed step to a recorded set
    replayed_sets:   checks the steps of a recorded set, and copies them to a run
    read.peers:      converts routes to the layouts of other trainers
"""

from pipeline.model.geometry import Geometry
from pipeline.traces.format.digests import routes_digest, token_digest
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
from pipeline.traces.format.types import Kind, Provenance, Routes, Sample, TraceError, VersionSpan
from pipeline.traces.read.early import check_shard, open_shard
from pipeline.traces.read.group_values import group_values
from pipeline.traces.read.joined import used_routes
from pipeline.traces.read.peers import dense_routes, to_slime, to_verl, to_verl_batch
from pipeline.traces.read.reader import read_routes, read_sample_file, read_samples
from pipeline.traces.read.stream import RouteStream, SampleStream
from pipeline.traces.recorded_sets import write_recorded_set
from pipeline.traces.replayed_sets import (
    Expected,
    check_replay,
    expected_of,
    names_weights,
    seal_replay,
)
from pipeline.traces.training_sets import seal_training_set
from pipeline.traces.write.library import new_sample, weights_digest, write_step
from pipeline.traces.write.routes_file import Compression
from pipeline.traces.write.seal import seal
from pipeline.traces.write.training import NewTrainingSet, write_training_routes
from pipeline.traces.write.writer import ShardWriter, write_samples, write_shard

__all__ = [
    "Compression",
    "Expected",
    "Geometry",
    "Kind",
    "Manifest",
    "NewTrainingSet",
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
    "check_replay",
    "check_shard",
    "dense_routes",
    "expected_ids",
    "expected_of",
    "group_id",
    "group_values",
    "names_weights",
    "new_sample",
    "open_manifest",
    "open_shard",
    "planned_id",
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
    "seal_training_set",
    "shard_ids",
    "to_slime",
    "to_verl",
    "to_verl_batch",
    "token_digest",
    "used_routes",
    "validation_id",
    "weights_digest",
    "write_recorded_set",
    "write_samples",
    "write_shard",
    "write_step",
    "write_training_routes",
]
