"""The weights digests of a trace's policy versions, as stored in commits and manifests."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.errors import cut
from pipeline.run.parse import field, listed, mapping, number, text
from pipeline.traces.format.domain import MOST
from pipeline.traces.format.types import TraceError

_DIGEST = re.compile("[0-9a-f]{64}")


def policies_json(policies: Mapping[int, str] | None) -> list[dict[str, Any]] | None:
    """Return the stored form of weights digests (keyed by policy version); None if unknown."""
    if policies is None:
        return None
    # JSON cannot hold numpy integers.
    return [{"version": int(v), "weights_sha256": policies[v]} for v in sorted(policies)]


def policies_text(policies: Mapping[int, str] | None) -> str:
    """Return the stored form of weights digests as JSON, for an error message."""
    return json.dumps(policies_json(policies))


def parse_policies(value: Any, name: str) -> dict[int, str] | None:
    """Parse the weights digests in a commit, and return them, keyed by policy version.

    Raises TraceError if they are malformed.
    """
    if value is None:
        return None
    try:
        found = listed(_policy)(value)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{name}: policies: {error}; remake the object") from error
    versions = [version for version, _ in found]
    if versions != sorted(set(versions)) or any(version > MOST for version in versions):
        raise TraceError(
            f"{name}: policy versions {versions}, expected ascending versions up to {MOST}"
        )
    for version, digest in found:
        if not _DIGEST.fullmatch(digest):
            raise TraceError(
                f"{name}: policy {version} has weights {cut(digest)}, expected a SHA-256 digest "
                "of 64 lower-case hexadecimal digits"
            )
    return dict(found)


def _policy(value: Any) -> tuple[int, str]:
    body = mapping(value)
    return field(body, "version", number), field(body, "weights_sha256", text)


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
