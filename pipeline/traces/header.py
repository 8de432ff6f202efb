"""Commit objects of traces: what they say of files, geometry and provenance."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.store import Store
from pipeline.store.commit import (
    CONTENT_SHA256,
    Committed,
    CorruptObjectError,
    commit,
    read_commit,
)
from pipeline.traces.chunks import TraceFile, from_json
from pipeline.traces.records import Geometry, Provenance, TraceError
from pipeline.traces.schema import (
    FORMAT,
    check_format,
    geometry_json,
    parse_geometry,
    parse_provenance,
    provenance_json,
)


@dataclass(frozen=True)
class Header:
    """What every commit object of a trace says."""

    key: str
    body: dict[str, Any]
    sha256: str
    """Of the body's content: what a manifest refers to."""
    geometry: Geometry | None
    provenance: Provenance | None
    files: tuple[TraceFile, ...]


def commit_header(
    store: Store,
    key: str,
    body: dict[str, Any],
    geometry: Geometry | None,
    provenance: Provenance | None,
    files: Sequence[TraceFile],
    attempt: str,
) -> Committed:
    """Commit trace files, once: see `pipeline.store.commit.commit`."""
    body = {
        **body,
        "format": FORMAT,
        "geometry": geometry_json(geometry),
        "provenance": provenance_json(provenance),
        "files": [file.to_json() for file in files],
    }
    return commit(store, key, body, attempt)


def read_header(store: Store, key: str) -> Header:
    """A trace's commit object, compared with its own digest, which it must have.

    Raises ObjectMissingError, CorruptObjectError, TraceError for a newer major format.
    """
    body = read_commit(store, key)
    name = f"{key} in {store.uri}"
    check_format(body.get("format"), name)
    if CONTENT_SHA256 not in body:
        raise CorruptObjectError(f"{name}: it has no {CONTENT_SHA256}; restore the object")
    if not isinstance(body.get("files"), list):
        raise TraceError(f"{name}: it lists no files")
    return Header(
        key=key,
        body=body,
        sha256=body[CONTENT_SHA256],
        geometry=parse_geometry(body.get("geometry"), name),
        provenance=parse_provenance(body.get("provenance"), name),
        files=tuple(from_json(file, name) for file in body["files"]),
    )


def same_source(header: Header, first: Header) -> None:
    """Raise TraceError unless two commits' routes are of one kind and policy version.

    The engine may differ: a run goes on after an upgrade, and each commit says who made it.
    """
    ours, theirs = (
        provenance and (provenance.kind, provenance.policy_version)
        for provenance in (header.provenance, first.provenance)
    )
    if ours != theirs:
        raise TraceError(f"{header.key}: routes of {ours}, but {first.key} has {theirs}")
