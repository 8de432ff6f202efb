"""Commit objects for traces: their files, geometry and provenance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.model.geometry import Geometry, geometry_json
from pipeline.run.commit import CONTENT_SHA256, other_place, read_commit
from pipeline.store import Store
from pipeline.traces.format.chunks import TraceFile, trace_files
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
    """The fields that all commit objects for traces have in common."""

    key: str
    body: dict[str, Any]
    sha256: str
    """Digest of the body's content; manifests refer to the commit by this digest."""
    geometry: Geometry | None
    provenance: Provenance | None
    files: tuple[TraceFile, ...]
    minor: int
    """The minor version of the format in which the commit was written."""
    policies: Mapping[int, str] | None
    """Weights digests, keyed by policy version; None if unknown (always in format 1.0)."""


def with_header(
    body: Mapping[str, Any],
    files: Sequence[TraceFile],
    geometry: Geometry | None,
    provenance: Provenance | None,
    policies: Mapping[int, str] | None,
) -> dict[str, Any]:
    """Return the body of a commit of trace files: `body`, with the common fields added.

    Args:
        body: The fields that only this kind of commit has.
        files: The commit's data files.
        geometry: Geometry of the routes; None if there are no routes.
        provenance: Origin of the routes; None if there are no routes.
        policies: Weights digests, keyed by policy version; None if unknown.
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
    """Read a trace's commit object and check it against the digest in its body.

    Raises ObjectMissingError, CorruptObjectError, and TraceError for a different major version.
    """
    body = read_commit(store, key)
    name = f"{key} in {store.uri}"
    minor = check_format(body.get("format"), name)
    if minor and "policies" not in body:
        raise TraceError(
            f"{name}: no policies in the commit, expected a list, or null if they are unknown; "
            "remake the object"
        )
    return Header(
        key=key,
        body=body,
        sha256=body[CONTENT_SHA256],
        geometry=read_geometry(body.get("geometry"), name),
        provenance=parse_provenance(body.get("provenance"), name),
        files=trace_files(body, name),
        minor=minor,
        policies=parse_policies(body.get("policies"), name) if minor else None,
    )


def check_place(store: Store, header: Header, place: Mapping[str, int]) -> None:
    """Check that a shard's commit states the step and shard to which its key belongs.

    Args:
        store: The store of the commit.
        header: The commit.
        place: The expected values of `step` and `shard`.

    Raises:
        TraceError: The commit states different values.
    """
    if (text := other_place(header.body, place)) is not None:
        raise TraceError(f"{header.key} in {store.uri}: {text}")


def same_source(header: Header, first: Header) -> None:
    """Raise TraceError unless the routes of two commits have the same kind and policy version.

    The engine may differ: a run can continue after an upgrade, and each commit names its engine.
    """
    ours, theirs = source(header.provenance), source(first.provenance)
    if ours != theirs:
        raise TraceError(
            f"{header.key}: its routes have {ours}, expected {theirs} as in {first.key}"
        )


def source(provenance: Provenance | None) -> str:
    """Return the part of a provenance that all commits of a step share, for messages."""
    if provenance is None:
        return "no provenance"
    return f"kind {provenance.kind} and policy version {provenance.policy_version}"
