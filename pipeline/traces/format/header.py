"""Commit objects for traces: the files of a rollout shard, of a sealed step, or of R2 routes."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from pipeline.model.geometry import Geometry, geometry_json, parse_geometry
from pipeline.run.commit import CONTENT_SHA256, DataFile, read_commit
from pipeline.store import Store
from pipeline.traces.format.schema import FORMAT, Role, check_format, provenance_json
from pipeline.traces.format.types import Provenance, TraceError

_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class TraceFile:
    """A Parquet file as described in its commit."""

    key: str
    size: int
    """Bytes."""
    sha256: str
    role: Role
    rows: int
    footer_size: int
    """Bytes from the start of the Parquet footer to the end of the file."""
    footer_sha256: str
    """Digest of these bytes. Page checksums cover a file's values, but not its footer."""
    layers: tuple[int, ...] = ()
    """Model indices of the MoE layers in a routes file; empty for other files."""

    @property
    def data(self) -> DataFile:
        """The file as a commit's data file."""
        return DataFile(self.key, self.size, self.sha256)


@dataclass(frozen=True)
class Header:
    """The fields that all commit objects for traces have in common."""

    key: str
    body: dict[str, Any]
    sha256: str
    """Digest of the body's content."""
    geometry: Geometry | None
    provenance: Provenance | None
    files: tuple[TraceFile, ...]
    policies: Mapping[int, str] | None
    """Weights digests, keyed by policy version; None if unknown."""
    run: str | None
    """Digest of the run's description; None outside a run."""


class _Policy(msgspec.Struct):
    version: int
    weights_sha256: str


class _Stored(msgspec.Struct):
    """The JSON form of a header."""

    step: int
    geometry: dict[str, Any] | None
    provenance: Provenance | None
    policies: list[_Policy] | None
    files: tuple[TraceFile, ...]
    run: str | None = None


def with_header(
    body: Mapping[str, Any],
    files: Sequence[TraceFile],
    geometry: Geometry | None,
    provenance: Provenance | None,
    policies: Mapping[int, str] | None,
    run: str | None,
) -> dict[str, Any]:
    """Return the body of a commit of trace files: `body`, with the common fields added.

    Args:
        body: The fields that only this kind of commit has.
        files: The commit's data files.
        geometry: Geometry of the routes; None if there are no routes.
        provenance: Origin of the routes; None if there are no routes.
        policies: Weights digests, keyed by policy version; None if unknown.
        run: Digest of the run's description; None outside a run.
    """
    return {
        **body,
        "format": FORMAT,
        "run": run,
        "geometry": geometry_json(geometry),
        "provenance": provenance_json(provenance),
        "policies": policies_json(policies),
        "files": files_json(files),
    }


def files_json(files: Iterable[TraceFile]) -> list[dict[str, Any]]:
    """Return the stored form of trace files."""
    return [{**asdict(file), "layers": list(file.layers)} for file in files]


def read_header(store: Store, key: str, place: Mapping[str, object]) -> Header:
    """Read a trace's commit object and check it against the digest in its body.

    Args:
        store: The store.
        key: The commit's key.
        place: Fields that say to what the commit belongs, with their expected values.

    Raises:
        ObjectMissingError: The commit does not exist.
        CorruptObjectError: The commit is damaged.
        TraceError: It has another major version, lacks a field, or belongs elsewhere.
    """
    body = read_commit(store, key)
    name = f"{key} in {store.uri}"
    check_format(body.get("format"), name)
    try:
        stored = msgspec.convert(body, _Stored)
        geometry = parse_geometry(stored.geometry)
    except (msgspec.ValidationError, ValueError) as error:
        raise TraceError(f"{name}: {error}; remake the object") from error
    if (found := {field: body.get(field) for field in place}) != place:
        raise TraceError(
            f"{name}: the commit of {found}, expected {dict(place)}; restore the object"
        )
    policies = None
    if stored.policies is not None:
        policies = {policy.version: policy.weights_sha256 for policy in stored.policies}
    return Header(
        key=key,
        body=body,
        sha256=body[CONTENT_SHA256],
        geometry=geometry,
        provenance=stored.provenance,
        files=stored.files,
        policies=policies,
        run=stored.run,
    )


def file_of(header: Header, role: Role) -> TraceFile:
    """Return a commit's file with the given role. Raises TraceError if it does not list one."""
    for file in header.files:
        if file.role == role:
            return file
    raise TraceError(f"{header.key}: no {role} file in this commit; remake the step")


def source(provenance: Provenance | None) -> str:
    """Return the part of a provenance that all commits of a step share, for messages.

    The engine may differ: a run can continue after an upgrade, and each commit names its engine.
    """
    if provenance is None:
        return "no provenance"
    return f"kind {provenance.kind} and policy version {provenance.policy_version}"


def policies_json(policies: Mapping[int, str] | None) -> list[dict[str, Any]] | None:
    """Return the stored form of weights digests (keyed by policy version); None if unknown."""
    if policies is None:
        return None
    # JSON cannot hold numpy integers.
    return [{"version": int(v), "weights_sha256": policies[v]} for v in sorted(policies)]


def check_policies(policies: Mapping[int, str] | None, name: str) -> None:
    """Raise TraceError unless all weights digests are SHA-256 digests."""
    for version, digest in (policies or {}).items():
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
            raise TraceError(
                f"{name}: policy {version} has weights {digest!r:.100}, expected a SHA-256 digest "
                "of 64 lower-case hexadecimal digits"
            )


def united(named: Iterable[tuple[str, Mapping[int, str] | None]]) -> dict[int, str] | None:
    """Return the weights digests of several commits, keyed by policy version.

    Each item is a commit's key, paired with the commit's digests. Returns None if the digests of a
    commit are unknown. Raises TraceError if two commits contain different digests for the same
    version.
    """
    made: dict[int, tuple[str, str]] = {}
    known = True
    for name, policies in named:
        known &= policies is not None
        for version, digest in (policies or {}).items():
            other, first = made.setdefault(version, (digest, name))
            if other != digest:
                raise TraceError(
                    f"{name}: policy {version} has weights {digest}, but {first} names {other}; "
                    "remake the step with one policy"
                )
    return {version: digest for version, (digest, _) in made.items()} if known else None
