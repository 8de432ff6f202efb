"""Training sets as a forger or a broken trainer would make them: right digests, wrong content."""

import json
from typing import Any

from pipeline.run import keys
from pipeline.run.commit import CONTENT_SHA256, content_digest
from pipeline.store import Store
from pipeline.traces import NewTrainingSet
from pipeline.traces.format.header import with_header
from tests.samples import GEOMETRY


def resign(store: Store, key: str, **changes: Any) -> dict[str, Any]:
    """Change an object, and its own digest with it. ... removes a key."""
    body = {**json.loads(store.read(key)), **changes}
    return put_signed(store, key, {name: value for name, value in body.items() if value != ...})


def put_signed(store: Store, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """Replace an object by one with its digest."""
    body = {name: value for name, value in body.items() if name != CONTENT_SHA256}
    body[CONTENT_SHA256] = content_digest(body)
    store.delete(key)
    store.create(key, json.dumps(body).encode())
    return body


def training_commits(store: Store, step: int = 0) -> list[str]:
    """Keys of all training commits of a step, named by its set or not."""
    listed = [info.key for info in store.list(keys.trainings(step))]
    return [key for key in listed if key.endswith(".json")]


def name_all(store: Store, new: NewTrainingSet, **changes: Any) -> None:
    """Write training.json of whatever commits are there, with counts of the manifest."""
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
