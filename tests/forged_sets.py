"""Training sets that a forger or a broken trainer could write, with valid digests but wrong
content."""

import json
from typing import Any

from pipeline.run import keys
from pipeline.run.commit import CONTENT_SHA256, content_digest
from pipeline.store import Store
from pipeline.traces import NewTrainingSet
from pipeline.traces.format.header import with_header
from tests.samples import GEOMETRY


def resign(store: Store, key: str, **changes: Any) -> dict[str, Any]:
    """Change fields of an object, and recompute its own digest. The value `...` removes a field."""
    body = {**json.loads(store.read(key)), **changes}
    return put_signed(store, key, {name: value for name, value in body.items() if value != ...})


def put_signed(store: Store, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """Replace an object with `body` and the digest of its content, and return the new object."""
    body = {name: value for name, value in body.items() if name != CONTENT_SHA256}
    body[CONTENT_SHA256] = content_digest(body)
    store.delete(key)
    store.create(key, json.dumps(body).encode())
    return body


def training_commits(store: Store, step: int = 0) -> list[str]:
    """Return the keys of all training commits of a step, including those not in training.json."""
    listed = [info.key for info in store.list(keys.trainings(step))]
    return [key for key in listed if key.endswith(".json")]


def name_all(store: Store, new: NewTrainingSet, **changes: Any) -> None:
    """Write a training.json that lists all training commits, with the manifest's counts."""
    step = new.manifest.step
    bodies = {key: json.loads(store.read(key)) for key in training_commits(store, step)}
    refs = [{"key": key, "commit_sha256": body[CONTENT_SHA256]} for key, body in bodies.items()]
    of_first = [body["digests"] for body in bodies.values() if 1 in body["geometry"]["layers"]]
    counts = {
        "samples": len(new.manifest.ids),
        "rows_total": sum(new.manifest.rows["rows_total"].to_pylist()),
        "rows_valid": sum(said[4] for digests in of_first for said in digests if said[4:]),
    }
    body = {
        "step": step,
        "manifest_sha256": new.manifest.sha256,
        "commits": refs,
        "counts": counts,
        "attempt": next((body["attempt"] for body in bodies.values()), new.id),
    }
    body = with_header(body, [], GEOMETRY, new.provenance, new.policies)
    put_signed(store, keys.training_set(step), {**body, **changes})
