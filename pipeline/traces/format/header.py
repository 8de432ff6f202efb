"""Commit objects of traces: their files, geometry and provenance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.model.geometry import Geometry, geometry_json
from pipeline.run.commit import CONTENT_SHA256, CorruptObjectError, read_commit
from pipeline.store import Store
from pipeline.traces.format.chunks import TraceFile, from_json
from pipeline.traces.format.policies import parse_policies, policies_json
from pipeline.traces.format.schema import (
    FORMAT,
    check_format,
    parse_provenance,
    provenance_json,
    read_geometry,
)
from pipeline.traces.format.types import Provenance, TraceError


@dataclass(frozen=True)
class Header:
    """What every commit object of a trace holds."""

    key: str
    body: dict[str, Any]
    sha256: str
    """Digest of the body's content; manifests refer to it."""
    geometry: Geometry | None
    provenance: Provenance | None
    files: tuple[TraceFile, ...]
    minor: int
    """The minor version of the format that it was written in."""
    policies: Mapping[int, str] | None
    """Weights digests by policy version; None: not known, as in format 1.0."""


def with_header(
    body: Mapping[str, Any],
    files: Sequence[TraceFile],
    geometry: Geometry | None,
    provenance: Provenance | None,
    policies: Mapping[int, str] | None,
) -> dict[str, Any]:
    """The body of a commit of trace files: the common fields, and those of `body`.

    `policies` are weights digests by policy version; None: not known.
    """
    return {
        **body,
        "format": FORMAT,
        "geometry": geometry_json(geometry),
        "provenance": provenance_json(provenance),
        "policies": policies_json(policies),
        "files": [file.to_json() for file in files],
    }


def read_header(store: Store, key: str) -> Header:
    """Read a trace's commit object and compare it with the digest that it must carry.

    Raises ObjectMissingError, CorruptObjectError, and TraceError for a newer major format.
    """
    body = read_commit(store, key)
    name = f"{key} in {store.uri}"
    minor = check_format(body.get("format"), name)
    if CONTENT_SHA256 not in body:
        raise CorruptObjectError(f"{name}: it has no {CONTENT_SHA256}; restore the object")
    if not isinstance(body.get("files"), list):
        raise TraceError(f"{name}: it lists no files")
    return Header(
        key=key,
        body=body,
        sha256=body[CONTENT_SHA256],
        geometry=read_geometry(body.get("geometry"), name),
        provenance=parse_provenance(body.get("provenance"), name),
        files=tuple(from_json(file, name) for file in body["files"]),
        minor=minor,
        policies=parse_policies(body.get("policies"), name) if minor else None,
    )


def same_source(header: Header, first: Header) -> None:
    """Raise TraceError unless the routes of two commits have the same kind and policy version.

    The engine may differ: a run can continue after an upgrade, and each commit names its engine.
    """
    ours, theirs = (
        provenance and (provenance.kind, provenance.policy_version)
        for provenance in (header.provenance, first.provenance)
    )
    if ours != theirs:
        raise TraceError(f"{header.key}: routes of {ours}, but {first.key} has {theirs}")
