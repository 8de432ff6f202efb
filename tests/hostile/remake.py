"""Level L1: recomputation of all digests that depend on a changed object.

A changed data file gets a new size, digest and ranges in its commits. A changed commit gets a new
digest of its own content, in itself and in the objects that name it, up to the root. All other
fields stay as the case set them. Digests of a sample's tokens and routes are content and stay too.
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
    """Return the object with the digest of its content."""
    rest = {name: value for name, value in body.items() if name != CONTENT_SHA256}
    return {**rest, CONTENT_SHA256: digest(rest)}


def digest(body: Any) -> str:
    """Return the content digest that docs/trace-format.md defines, even of hostile values."""
    return sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def text(body: Any) -> bytes:
    """Return JSON in another writer's layout; values may be invalid, such as NaN or surrogates."""
    return json.dumps(body).encode()


def remade(objects: Objects, changes: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the changes, along with the objects whose digests depend on them."""
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
    """Return a JSON object's content digest or, for any other object, the digest of its bytes."""
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
    """Update the entries about a changed object within the value of another object.

    An entry contains the size, digests or ranges of the changed object.
    """
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
    """Return whether the changed object is the manifest whose digest the holder contains.

    In a recorded set, the holder contains the digest of the run's manifest. The set's own manifest
    contains the holder's digest, so the holder cannot contain the manifest's.
    """
    step = keys.folder_number(holder)
    if step is None or changed != keys.manifest(step):
        return False
    body = _object(holder, objects.get(holder, b""))
    own = content_of(objects[changed]) if changed in objects else None
    return body is None or body.get("manifest_sha256") == own


def described(key: str, content: bytes, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the new ranges of a file's entry in a commit; {} if it is not a Parquet file."""
    try:
        file = describe(content, DataFile(key, len(content), sha256(content)), entry["role"])
    except (pa.ArrowException, OSError):
        return {}
    ranges = file.to_json()
    return {name: ranges[name] for name in ("footer", "leaves", "row_groups")}
