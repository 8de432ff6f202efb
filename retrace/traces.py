"""Functions and types to write and read traces, for other engines and trainers.

    retrace.traces.write_step(store, 0, samples, geometry, provenance)
    manifest = retrace.traces.read_manifest(store, 0)
    for sample in retrace.traces.read_samples(store, manifest, manifest.ids):
        sample.response_tokens_G, sample.reward

`Run.step` returns the samples of a stored run together with their texts. The functions here work on
any store. docs/library.md shows each of them with examples.
"""

from pathlib import Path

from pipeline.policies import weights
from pipeline.run.commit import CorruptObjectError, new_write_id
from pipeline.store import ObjectExistsError, ObjectMissingError, place_text
from pipeline.traces import (
    Geometry,
    Kind,
    Manifest,
    Provenance,
    Routes,
    Sample,
    SealedManifest,
    ShardWriter,
    TraceError,
    VersionSpan,
    check_shard,
    dense_routes,
    new_sample,
    open_manifest,
    open_shard,
    read_manifest,
    read_routes,
    read_samples,
    seal,
    to_slime,
    to_verl,
    to_verl_batch,
    token_digest,
    used_routes,
    write_step,
)

__all__ = [
    "CorruptObjectError",
    "Geometry",
    "Kind",
    "Manifest",
    "ObjectExistsError",
    "ObjectMissingError",
    "Provenance",
    "Routes",
    "Sample",
    "SealedManifest",
    "ShardWriter",
    "TraceError",
    "VersionSpan",
    "check_shard",
    "dense_routes",
    "new_sample",
    "new_write_id",
    "open_manifest",
    "open_shard",
    "read_manifest",
    "read_routes",
    "read_samples",
    "seal",
    "to_slime",
    "to_verl",
    "to_verl_batch",
    "token_digest",
    "used_routes",
    "weights_digest",
    "write_step",
]


def weights_digest(folder: str | Path) -> str:
    """Return the digest of all tensors in the safetensors files of a folder.

    The digest does not depend on how tensors are divided among files. Raises TraceError if the
    folder does not contain safetensors files, if a file is malformed or incomplete, or if the
    folder's index lists a file that is missing. Also raises OSError.
    """
    try:
        path = Path(place_text(folder))
    except ValueError as error:
        raise TraceError(f"weights: {error}; give the folder of a policy") from error
    try:
        files = weights.weights_files(path)
        digest = weights.weights_digest(map(weights.read_weights, files))
    except ValueError as error:
        raise TraceError(f"weights in {folder}: {error}") from error
    if not files:
        raise TraceError(f"{folder}: no *{weights.SUFFIX} files, expected the weights of a policy")
    return digest
