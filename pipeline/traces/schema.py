"""What stands in the three kinds of trace files: columns and file metadata.

Format version 1.0. A reader ignores columns that it does not know and refuses a newer major
version; docs/trace-format.md is the specification.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

import pyarrow as pa

import pipeline
from pipeline.traces.codec import coding
from pipeline.traces.records import Geometry, Kind, Provenance, TraceError

FORMAT = "1.0"
Role = Literal["samples", "routes", "manifest"]

MOST_EXPERTS, MOST_TOPK = 65_536, 64

SEGMENTS = pa.list_(pa.struct([("row", pa.int32()), ("tokens", pa.int32())]))
"""Where the rows of a sample are: of each such row of a routes file the first `tokens` tokens."""

_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])

SUMMARY = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("policy_version", pa.int32(), nullable=False),  # the oldest of the spans
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("response_length", pa.int32(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("reward_error", pa.string()),
        pa.field("token_digest", pa.string(), nullable=False),
        pa.field("routes_digest", pa.string()),  # null: no routes
        pa.field("rows_valid", pa.int32()),  # null: no routes
        pa.field("rows_total", pa.int32(), nullable=False),
    ]
)
"""What the manifest repeats of each sample."""

SAMPLES = pa.schema(
    [
        *SUMMARY,
        pa.field("segments", SEGMENTS),  # of the routes file; null: no routes
        pa.field("prompt_tokens", pa.list_(pa.uint32()), nullable=False),
        pa.field("response_tokens", pa.list_(pa.uint32()), nullable=False),
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),
        pa.field("logprobs", pa.list_(pa.float32()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("version_spans", pa.list_(_SPAN), nullable=False),
        pa.field("seed", pa.int64(), nullable=False),
        pa.field("extras", pa.string(), nullable=False),  # JSON object
    ]
)

MANIFEST = pa.schema(
    [
        *SUMMARY,
        # `file` counts the manifest's list of files, `row` the rows of that file.
        pa.field("samples", pa.struct([("file", pa.int32()), ("row", pa.int32())]), nullable=False),
        pa.field(
            "routes",  # null: no routes
            pa.list_(pa.struct([("file", pa.int32()), ("segments", SEGMENTS)])),
        ),
    ]
)

SEGMENT = pa.schema(
    [
        pa.field("owner", pa.string(), nullable=False),  # sample id, or group: of a prompt
        pa.field("token_start", pa.int32(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("validity", pa.binary()),  # null: every row is valid
    ]
)


def layer_column(layer: int) -> str:
    """The column of a layer's coded sets, by the layer's index in the model."""
    return f"layer_{layer:05d}"


def routes_schema(geometry: Geometry) -> pa.Schema:
    """Columns of a routes file."""
    layers = [pa.field(layer_column(i), pa.binary(), nullable=False) for i in geometry.layers]
    return pa.schema([*SEGMENT, *layers])


def file_metadata(
    role: Role, geometry: Geometry | None, provenance: Provenance | None
) -> dict[str, str]:
    """Key-value metadata of a file."""
    metadata = {
        "retrace.format": FORMAT,
        "retrace.role": role,
        "retrace.producer": f"retrace {pipeline.__version__}",
    }
    if geometry is not None:
        parse_geometry(geometry_json(geometry), "writing a file")  # nothing that no reader takes
        metadata["retrace.geometry"] = json.dumps(geometry_json(geometry))
        metadata["retrace.coding"] = coding(geometry.experts)
    if provenance is not None:
        metadata["retrace.provenance"] = json.dumps(provenance_json(provenance))
    return metadata


def check_metadata(
    found: Mapping[bytes, bytes] | None, role: str, geometry: Geometry | None, name: str
) -> None:
    """Refuse a file that is of a newer major format, another kind or another geometry."""
    text = {key.decode(): value.decode() for key, value in (found or {}).items()}
    if "retrace.format" not in text:
        raise TraceError(f"{name}: not a trace file (no retrace.format in its metadata)")
    check_format(text["retrace.format"], name)
    if text.get("retrace.role") != role:
        raise TraceError(f"{name}: a {text.get('retrace.role')} file, expected {role}")
    if geometry is None or role != "routes":
        return
    theirs = parse_geometry(json.loads(text.get("retrace.geometry", "null")), name)
    if theirs != geometry:
        raise TraceError(f"{name}: made for {theirs}, its commit says {geometry}")
    if text.get("retrace.coding") != coding(geometry.experts):
        raise TraceError(
            f"{name}: coding {text.get('retrace.coding')!r} is not known, "
            f"expected {coding(geometry.experts)!r}"
        )


def check_format(version: object, name: str) -> None:
    """Refuse another major version of the format: a newer one, or the drafts before 1.0."""
    major = version.split(".")[0] if isinstance(version, str) else ""
    if not major.isdecimal():
        raise TraceError(f"{name}: format version {version!r}, expected like {FORMAT!r}")
    ours, theirs = int(FORMAT.split(".")[0]), int(major)
    if theirs > ours:
        raise TraceError(
            f"{name}: format version {version} is newer than {FORMAT}; use a newer retrace"
        )
    if theirs < ours:
        raise TraceError(
            f"{name}: format version {version} was a draft of {FORMAT}; make the run again"
        )


def geometry_json(geometry: Geometry | None) -> dict[str, Any] | None:
    """A geometry as it stands in metadata and commits."""
    if geometry is None:
        return None
    return {"experts": geometry.experts, "topk": geometry.topk, "layers": list(geometry.layers)}


def parse_geometry(value: Any, name: str) -> Geometry | None:
    """The reverse. Raises TraceError when it is not a geometry."""
    if value is None:
        return None
    try:
        experts, topk, layers = value["experts"], value["topk"], tuple(value["layers"])
    except (KeyError, TypeError) as error:
        raise TraceError(f"{name}: geometry {value!r} is not one") from error
    numbers = all(isinstance(n, int) and n >= 0 for n in (experts, topk, *layers))
    sizes = numbers and 0 < topk <= min(experts, MOST_TOPK) and experts <= MOST_EXPERTS
    if not sizes or list(layers) != sorted(set(layers)):
        raise TraceError(
            f"{name}: geometry {value!r}: expected 0 < topk <= experts <= {MOST_EXPERTS}, topk <= "
            f"{MOST_TOPK}, layers ascending"
        )
    return Geometry(experts, topk, layers)


def provenance_json(provenance: Provenance | None) -> dict[str, Any] | None:
    """A provenance as it stands in metadata and commits."""
    if provenance is None:
        return None
    return {
        "kind": provenance.kind,
        "policy_version": provenance.policy_version,
        "engine": provenance.engine,
    }


def parse_provenance(value: Any, name: str) -> Provenance | None:
    """The reverse. Raises TraceError when it is not a provenance."""
    if value is None:
        return None
    try:
        made = Provenance(value["kind"], value["policy_version"], value["engine"])
    except (KeyError, TypeError) as error:
        raise TraceError(f"{name}: provenance {value!r} is not one") from error
    if made.kind not in get_args(Kind):
        raise TraceError(f"{name}: kind of trace {made.kind!r}, expected one of {get_args(Kind)}")
    return made
