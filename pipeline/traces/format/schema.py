"""Columns and file metadata of the three kinds of trace files.

The format version is 1.1. Readers ignore unknown columns and refuse a newer major version.
docs/trace-format.md is the specification.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import pyarrow as pa

import pipeline
from pipeline.errors import cut
from pipeline.model.geometry import Geometry, geometry_json, parse_geometry
from pipeline.run.strict_json import parse_json
from pipeline.traces.format.codec import Coding, coding, has_gaps
from pipeline.traces.format.domain import check_geometry, check_provenance
from pipeline.traces.format.types import Provenance, TraceError

FORMAT = "1.1"
_VERSION = re.compile(r"(0|[1-9][0-9]{0,4})\.(0|[1-9][0-9]{0,4})")
Role = Literal["samples", "routes", "manifest"]

SEGMENTS = pa.list_(pa.struct([("row", pa.int32()), ("tokens", pa.int32())]))
"""The rows of a routes file whose first `tokens` tokens contain a sample's routes."""

_SPAN = pa.struct([("version", pa.int32()), ("start", pa.int32()), ("end", pa.int32())])

SUMMARY = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("group", pa.string(), nullable=False),
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("policy_version", pa.int32(), nullable=False),  # the oldest version of the spans
        pa.field("prompt_length", pa.int32(), nullable=False),
        pa.field("response_length", pa.int32(), nullable=False),
        pa.field("reward", pa.float64()),
        pa.field("reward_error", pa.string()),
        pa.field("token_digest", pa.string(), nullable=False),
        pa.field("routes_digest", pa.string()),  # null: no routes
        pa.field("rows_valid", pa.int32()),  # null: no routes
        pa.field("rows_total", pa.int32(), nullable=False),
        pa.field("branch_of", pa.string()),  # the sample's first sequence; null: not a branch
    ]
)
"""The columns that samples files and the manifest have in common."""

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
        # `file` is an index into the manifest's list of files, and `row` is a row of that file.
        pa.field("samples", pa.struct([("file", pa.int32()), ("row", pa.int32())]), nullable=False),
        pa.field(
            "routes",  # null: no routes
            pa.list_(pa.struct([("file", pa.int32()), ("segments", SEGMENTS)])),
        ),
        # The routes digest of each part of `routes`; null: a single part, or unknown.
        pa.field("part_digests", pa.list_(pa.string())),
        pa.field("not_trained", pa.string()),  # reason for exclusion; null: not excluded
    ]
)

SEGMENT = pa.schema(
    [
        pa.field("owner", pa.string(), nullable=False),  # sample id; group for a shared prompt
        pa.field("token_start", pa.int32(), nullable=False),
        pa.field("tokens", pa.int32(), nullable=False),
        pa.field("validity", pa.binary()),  # null: every row is valid
    ]
)

_SINCE = {"branch_of": 1, "part_digests": 1, "not_trained": 1}
"""The minor version that introduced each column; files of older versions lack the column."""


def absent_columns(
    names: Sequence[str], found: Collection[str], minor: int, name: str
) -> list[str]:
    """Return the columns that a file lacks because a later minor version introduced them.

    In such a file, these columns are null in every row.

    Args:
        names: The columns to read.
        found: The columns of the file.
        minor: The minor version of the file.
        name: The file, for the error message.

    Raises:
        TraceError: The file lacks a column that its version requires.
    """
    absent = [column for column in names if column not in found]
    if missing := [column for column in absent if minor >= _SINCE.get(column, 0)]:
        raise TraceError(f"{name}: no column {', '.join(missing)}; found {sorted(found)}")
    return absent


def layer_column(layer: int) -> str:
    """Return the name of the column that contains the coded sets of a layer.

    `layer` is the index of the layer in the model.
    """
    return f"layer_{layer:05d}"


def routes_schema(geometry: Geometry) -> pa.Schema:
    """Return the columns of a routes file."""
    layers = [pa.field(layer_column(i), pa.binary(), nullable=False) for i in geometry.layers]
    return pa.schema([*SEGMENT, *layers])


def file_metadata(
    role: Role,
    geometry: Geometry | None,
    provenance: Provenance | None,
    stored: Coding | None = None,
) -> dict[str, str]:
    """Return the key-value metadata of a file.

    Args:
        role: The kind of file.
        geometry: Geometry of the routes; None if there are no routes.
        provenance: Origin of the routes; None if there are no routes.
        stored: The coding of the sets; None means gaps.
    """
    metadata = {
        "retrace.format": FORMAT,
        "retrace.role": role,
        "retrace.producer": f"retrace {pipeline.__version__}",
    }
    if geometry is not None:
        check_geometry(geometry, "writing a file")
        metadata["retrace.geometry"] = json.dumps(geometry_json(geometry))
        metadata["retrace.coding"] = stored or coding(geometry.experts)
    if provenance is not None:
        metadata["retrace.provenance"] = json.dumps(provenance_json(provenance))
    return metadata


def check_metadata(
    found: Mapping[bytes, bytes] | None, role: str, geometry: Geometry | None, name: str
) -> int:
    """Check a file's format, role and geometry, and return its minor version.

    Args:
        found: Key-value metadata from the file's footer.
        role: The expected role.
        geometry: The geometry that a routes file must have; None skips this check.
        name: The file, for error messages.

    Raises:
        TraceError: The major version, role, geometry or coding is not as expected.
    """
    text = {key.decode(): value.decode() for key, value in (found or {}).items()}
    if "retrace.format" not in text:
        raise TraceError(f"{name}: not a trace file: no retrace.format in its metadata")
    minor = check_format(text["retrace.format"], name)
    if text.get("retrace.role") != role:
        raise TraceError(f"{name}: a {text.get('retrace.role')} file, expected {role}")
    if geometry is None or role != "routes":
        return minor
    theirs = read_geometry(parse_json(text.get("retrace.geometry", "null")), name)
    if theirs != geometry:
        raise TraceError(f"{name}: geometry {theirs}, expected {geometry} as in its commit")
    try:
        has_gaps(text.get("retrace.coding"), geometry.experts)
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from error
    return minor


def check_format(version: object, name: str) -> int:
    """Return the minor part of a format version.

    Raises TraceError for a newer or older major version, and for a malformed version.
    """
    found = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if found is None:
        raise TraceError(
            f"{name}: format version {cut(version)}, expected two numbers of at most 5 digits "
            f"without leading zeros, such as {FORMAT!r}"
        )
    ours, theirs = int(FORMAT.split(".")[0]), int(found[1])
    if theirs > ours:
        raise TraceError(
            f"{name}: format version {version} is newer than {FORMAT}; use a newer retrace"
        )
    if theirs < ours:
        raise TraceError(f"{name}: format version {version} was a draft of 1.0; repeat the run")
    return int(found[2])


def read_geometry(value: Any, name: str) -> Geometry | None:
    """Parse a geometry from metadata or a commit. Raises TraceError if it is invalid."""
    try:
        return parse_geometry(value)
    except ValueError as error:
        raise TraceError(f"{name}: geometry: {error}") from error


def provenance_json(provenance: Provenance | None) -> dict[str, Any] | None:
    """Return a provenance in the form stored in metadata and commits."""
    if provenance is None:
        return None
    return {
        "kind": provenance.kind,
        "policy_version": int(provenance.policy_version),  # JSON cannot hold numpy integers
        "engine": provenance.engine,
    }


def parse_provenance(value: Any, name: str) -> Provenance | None:
    """Parse a provenance from metadata or a commit. Raises TraceError if it is invalid."""
    if value is None:
        return None
    try:
        made = Provenance(value["kind"], value["policy_version"], value["engine"])
    except (KeyError, TypeError) as error:
        raise TraceError(f"{name}: malformed provenance {cut(value)}") from error
    return check_provenance(made, name)
