"""Stores in trace format 1.0; tests/data/README.md describes them."""

import io
import json
import zipfile
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.run.commit import CONTENT_SHA256, content_digest, to_json
from pipeline.run.keys import commits_shard
from pipeline.store import Store, open_store
from tests.paths import ROOT

_STORES = ROOT / "tests/data/format-1.0.zip"


def old_store(name: str, folder: Path) -> Store:
    """Unpack one store into a folder."""
    store = open_store(f"file://{folder}/{name}")
    for key, data in old_objects(name).items():
        store.create(key, data)
    return store


def old_objects(name: str) -> dict[str, bytes]:
    """Return a mapping from the keys of one store's objects to their contents."""
    with zipfile.ZipFile(_STORES) as packed:
        mine = [m for m in packed.namelist() if m.startswith(f"{name}/") and not m.endswith("/")]
        objects = {member.removeprefix(f"{name}/"): packed.read(member) for member in mine}
    for key in objects:
        if commits_shard(key) and key.startswith("validations/"):
            objects[key] = _summed(objects, key)
    return objects


def _summed(objects: dict[str, bytes], key: str) -> bytes:
    """Return a validation's commit with the sum of its rewards.

    Workers wrote the sum at the time of format 1.0, but the script that wrote these stores did not.
    """
    body = json.loads(objects[key])
    (file,) = body["files"]
    rewards = pq.read_table(io.BytesIO(objects[file["key"]]))["reward"]
    body["reward_sum"] = pc.sum(rewards).as_py()
    return to_json({**body, CONTENT_SHA256: content_digest(body)})


def old_digests(name: str) -> dict[str, str | None]:
    """Return, for each sample of step 0, the digest of the routes that training used.

    The digest is None for a sample without routes.
    """
    with zipfile.ZipFile(_STORES) as packed:
        return json.loads(packed.read("expected.json"))[name]
