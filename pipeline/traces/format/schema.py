"""Columns and file metadata of the three kinds of trace files.

docs/trace-format.md is the specification. Readers ignore columns and metadata that they do not
know, and refuse another major version.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import pyarrow as pa

import pipeline
from pipeline.errors import cut
from pipeline.model.geometry import Geometry, geometry_json
from pipeline.traces.format.types import Provenance, TraceError

FORMAT = "2.0"
Role = Literal["samples", "routes", "manifest"]
_VERSION = re.compile(r"([0-9]{1,5})\.[0-9]{1,5}")

SEGMENTS = pa.list_(pa.struct([("start", pa.int32()), ("row", pa.int32()), ("tokens", pa.int32())]))
"""Where a sample's rows are in a routes file: positions start..start+tokens-1 are the file's rows
row..row+tokens-1."""

_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])


def _required(name: str, type_: pa.DataType) -> pa.Field:
    return pa.field(name, type_, nullable=False)


SUMMARY = pa.schema(
    [
        _required("id", pa.string()),
        _required("group", pa.string()),
        _required("prompt_id", pa.string()),
        _required("policy_version", pa.int32()),  # the oldest version of the spans
        _required("prompt_length", pa.int32()),
        _required("response_length", pa.int32()),
        pa.field("reward", pa.float64()),
        pa.field("reward_error", pa.string()),
        _required("token_digest", pa.string()),
        pa.field("rows_valid", pa.int32()),  # null: no routes
        _required("rows_total", pa.int32()),
        pa.field("branch_of", pa.string()),  # the sample's first sequence; null: not a branch
    ]
)
"""The columns that samples files and the manifest have in common."""

SAMPLES = pa.schema(
    [
        *SUMMARY,
        pa.field("segments", SEGMENTS),  # in the shard's routes file; null: no routes
        _required("prompt_tokens", pa.list_(pa.uint32())),
        _required("response_tokens", pa.list_(pa.uint32())),
        _required("loss_mask", pa.list_(pa.bool_())),
        _required("logprobs", pa.list_(pa.float32())),
        _required("finish_reason", pa.string()),
        _required("version_spans", pa.list_(_SPAN)),
        _required("seed", pa.int64()),
        _required("extras", pa.string()),  # JSON object
    ]
)

MANIFEST = pa.schema(
    [
        *SUMMARY,
        # `file` is an index into the manifest's list of files, and `row` is a row of that file.
        _required("samples", pa.struct([("file", pa.int32()), ("row", pa.int32())])),
        pa.field(  # null: no routes; several entries: R2 routes of several ranks
            "routes", pa.list_(pa.struct([("file", pa.int32()), ("segments", SEGMENTS)]))
        ),
        pa.field("not_trained", pa.string()),  # reason for exclusion; null: not excluded
    ]
)

TOKEN = pa.schema(
    [
        _required("sample", pa.string()),
        _required("position", pa.int32()),
        _required("valid", pa.bool_()),
    ]
)
"""The columns of a routes file that are not a layer's."""


def layer_column(layer: int) -> str:
    """Return the name of the column with the expert ids of a layer (its index in the model)."""
    return f"layer_{layer:05d}"


def routes_schema(geometry: Geometry) -> pa.Schema:
    """Return the columns of a routes file.

    A layer's column holds the ascending expert ids of a row, as K bytes or, above 256 experts, as K
    little-endian uint16.
    """
    ids = pa.binary(geometry.topk * geometry.dtype().itemsize)
    return pa.schema([*TOKEN, *(_required(layer_column(i), ids) for i in geometry.layers)])


def file_metadata(
    role: Role,
    origin: Mapping[str, Any],
    geometry: Geometry | None = None,
    provenance: Provenance | None = None,
) -> dict[str, str]:
    """Return the key-value metadata of a file.

    Args:
        role: The kind of file.
        origin: What the file belongs to: its run, step, shard or rank, and policies.
        geometry: Geometry of a routes file.
        provenance: Origin of the routes.
    """
    metadata = {
        "retrace.format": FORMAT,
        "retrace.role": role,
        "retrace.producer": f"retrace {pipeline.__version__}",
        "retrace.origin": json.dumps(origin),
    }
    if geometry is not None:
        metadata["retrace.geometry"] = json.dumps(geometry_json(geometry))
    if provenance is not None:
        metadata["retrace.provenance"] = json.dumps(provenance_json(provenance))
    return metadata


def check_format(version: object, name: str) -> None:
    """Raise TraceError unless a stored format version has the major version of FORMAT.

    `name` is the object, for the error message.
    """
    found = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if found is None:
        raise TraceError(f"{name}: format version {cut(version)}, expected one like {FORMAT!r}")
    ours, theirs = int(FORMAT.split(".")[0]), int(found[1])
    if theirs > ours:
        raise TraceError(f"{name}: format {version} is newer than {FORMAT}; use a newer retrace")
    if theirs < ours:
        raise TraceError(
            f"{name}: format {version} was a draft of {FORMAT}, which no release wrote; repeat "
            "the run"
        )


def provenance_json(provenance: Provenance | None) -> dict[str, Any] | None:
    """Return a provenance in the form stored in metadata and commits."""
    if provenance is None:
        return None
    return {
        "kind": provenance.kind,
        "policy_version": int(provenance.policy_version),  # JSON cannot hold numpy integers
        "engine": provenance.engine,
    }
