"""Which weights the policy versions of a trace had, as commits and manifests name them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pipeline.run.parse import items, number, text
from pipeline.traces.format.types import TraceError

_MOST = 2**31 - 1
_DIGEST = re.compile("[0-9a-f]{64}")


def policies_json(policies: Mapping[int, str] | None) -> list[dict[str, Any]] | None:
    """Weights digests by policy version in the form stored in commits; None: not known."""
    if policies is None:
        return None
    return [{"version": v, "weights_sha256": digest} for v, digest in sorted(policies.items())]


def parse_policies(value: Any, name: str) -> dict[int, str] | None:
    """Parse the weights digests of a commit, by policy version. Raises TraceError."""
    if value is None:
        return None
    try:
        found = [(number(of["version"]), text(of["weights_sha256"])) for of in items(value)]
    except (KeyError, TypeError) as error:
        raise TraceError(f"{name}: its policies are no list of them: {error!r}") from error
    versions = [version for version, _ in found]
    if versions != sorted(set(versions)) or any(version > _MOST for version in versions):
        raise TraceError(
            f"{name}: policies of versions {versions}, expected ascending ones up to {_MOST}"
        )
    for version, digest in found:
        if not _DIGEST.fullmatch(digest):
            raise TraceError(
                f"{name}: policy {version} has weights {digest!r}, expected a SHA-256 in 64 "
                "lower-case hexadecimal digits"
            )
    return dict(found)


def united(named: Iterable[tuple[str, Mapping[int, str] | None]]) -> dict[int, str] | None:
    """The weights that several commits name, each given with the key of its commit.

    None when one of them does not know its weights. Raises TraceError when two name different
    weights of one version.
    """
    made: dict[int, tuple[str, str]] = {}
    known = True
    for name, policies in named:
        known &= policies is not None
        for version, digest in (policies or {}).items():
            other, first = made.setdefault(version, (digest, name))
            if other != digest:
                raise TraceError(
                    f"{name}: policy {version} has weights {digest}, {first} says {other}; "
                    "remake the step with one policy"
                )
    return {version: digest for version, (digest, _) in made.items()} if known else None
