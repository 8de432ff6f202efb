"""Commit objects of traces.

They carry the SHA-256 of their own content, so that none is believed that was changed after it
was written.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.store import Store
from pipeline.store.commit import (
    Committed,
    CorruptObjectError,
    commit,
    read_commit,
    sha256,
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

_DIGEST = "content_sha256"


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
        "attempt": attempt,
    }
    return commit(store, key, {**body, _DIGEST: content_digest(body)}, attempt)


def read_header(store: Store, key: str) -> Header:
    """A trace's commit object, checked against its own digest.

    Raises ObjectMissingError, CorruptObjectError, TraceError for a newer major format.
    """
    body = read_commit(store, key)
    name = f"{key} in {store.uri}"
    check_format(body.get("format"), name)
    digest = content_digest({k: v for k, v in body.items() if k != _DIGEST})
    if body.get(_DIGEST) != digest:
        raise CorruptObjectError(
            f"{name}: its content has SHA-256 {digest[:16]}..., it says "
            f"{str(body.get(_DIGEST))[:16]}...; restore the object or remake the step"
        )
    if not isinstance(body.get("files"), list):
        raise TraceError(f"{name}: it lists no files")
    return Header(
        key=key,
        body=body,
        sha256=digest,
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


def content_digest(body: dict[str, Any]) -> str:
    """Hex SHA-256 of a commit without its own digest: JSON, sorted keys, no blanks, ASCII."""
    return sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
