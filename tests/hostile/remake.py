"""Level L1: whoever changed an object recomputes all digests that follow from it.

A change of a data file changes its size, digest and ranges in commits; one of a commit its own
digest, and those that other objects give of it, up to the root. What else a commit says stays
as the case made it. Digests of tokens and routes by sample are content: they stay, too.
"""

import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from pipeline.run import keys
from pipeline.run.commit import CONTENT_SHA256, DataFile, sha256
from pipeline.traces.format.chunks import describe
from tests.hostile.worlds import Objects


def signed(body: Mapping[str, Any]) -> dict[str, Any]:
    """The object with the digest of its content."""
    rest = {name: value for name, value in body.items() if name != CONTENT_SHA256}
    return {**rest, CONTENT_SHA256: digest(rest)}


def digest(body: Any) -> str:
    """The content digest as the page says it, of hostile values, too."""
    return sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def text(body: Any) -> bytes:
    """JSON as a foreign writer would lay it out; also of what is none of ours (NaN, surrogates)."""
    return json.dumps(body).encode()


def remade(objects: Objects, changes: Mapping[str, bytes]) -> dict[str, bytes]:
    """The changes with all digests that follow from them."""
    found = dict(changes)
    now = {**objects, **changes}
    for key, data in changes.items():
        body = _object(key, data)
        if body is not None and CONTENT_SHA256 in body:
            found[key] = now[key] = text(signed(body))
    waiting = [key for key in changes if now[key] != objects.get(key)]
    while waiting:
        changed = waiting.pop(0)
        for key in sorted(now):
            if key == changed or not key.endswith(".json"):
                continue
            body = _object(key, now[key])
            if body is None or CONTENT_SHA256 not in body:
                continue
            before = json.dumps(body)
            _refer(body, key, changed, objects, now)
            if json.dumps(body) != before:
                found[key] = now[key] = text(signed(body))
                waiting.append(key)
    return found


def content_of(data: bytes) -> str:
    """The content digest that an object gives of itself, or has."""
    body = _object("x.json", data)
    if body is None:
        return sha256(data)
    return digest({name: value for name, value in body.items() if name != CONTENT_SHA256})


def _object(key: str, data: bytes) -> dict[str, Any] | None:
    if not key.endswith(".json"):
        return None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None


def _refer(value: Any, holder: str, changed: str, objects: Objects, now: Objects) -> None:
    """Bring what an object says of a changed one up to date."""
    if isinstance(value, list):
        for inner in value:
            _refer(inner, holder, changed, objects, now)
    if not isinstance(value, dict):
        return
    for inner in value.values():
        _refer(inner, holder, changed, objects, now)
    if "manifest_sha256" in value and _is_tied(holder, changed, objects):
        value["manifest_sha256"] = content_of(now[changed])
    if "commit_sha256" in value and changed == value.get("commit", value.get("key")):
        value["commit_sha256"] = content_of(now[changed])
    if value.get("key") == changed and "sha256" in value:
        value["sha256"] = sha256(now[changed])
        if "size" in value:
            value["size"] = len(now[changed])
        if "row_groups" in value:
            value.update(described(changed, now[changed], value))


def _is_tied(holder: str, changed: str, objects: Objects) -> bool:
    """Whether what changed is the manifest of the holder's step, whose digest the holder gave.

    In a recorded set it gave that of the run's manifest. The set's own names the holder by its
    digest, so neither could ever have the other's.
    """
    step = keys.folder_number(holder)
    if step is None or changed != keys.manifest(step):
        return False
    body = _object(holder, objects.get(holder, b""))
    own = content_of(objects[changed]) if changed in objects else None
    return body is None or body.get("manifest_sha256") == own


def described(key: str, content: bytes, entry: Mapping[str, Any]) -> dict[str, Any]:
    """The ranges of a file as a commit gives them; of what is no Parquet file those that it had."""
    try:
        file = describe(content, DataFile(key, len(content), sha256(content)), entry["role"])
    except (pa.ArrowException, OSError):
        return {}
    ranges = file.to_json()
    return {name: ranges[name] for name in ("footer", "leaves", "row_groups")}
