"""Fuzz readers with commits and manifest rows from a broken or hostile writer; all digests match.

The first byte of an input selects the mode and the commit. Edits of three bytes each follow. An
edit selects a value in the JSON commit (or in the manifest's rows) and its replacement. Every input
therefore passes the JSON parser and the digest checks, and the fuzzer learns which edits get
furthest. If the first byte is 255, the rest of the input is the raw text of a manifest.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from typing import Any

import atheris
import pyarrow as pa

with atheris.instrument_imports(include=["pipeline"]):
    from pipeline.run import keys
    from pipeline.run.commit import CONTENT_SHA256, content_digest, to_json
    from pipeline.traces import (
        RouteStream,
        open_manifest,
        read_manifest,
        read_routes,
        read_samples,
    )
    from pipeline.traces.format.schema import MANIFEST
    from pipeline.traces.read.joined import used_routes
    from pipeline.traces.write.files import FileWriter
    from pipeline.upkeep.verify import verify

from fuzz.harness import run
from tests.memory_store import MemoryStore
from tests.samples import make_samples, sealed_r2, sealed_r3

_NUMBERS = [0, 1, -1, 2, 3, 7, 255, 2**31 - 1, 2**31, 2**63, 2**70, -(2**70), 0.5, 1e308]
_TEXTS = ["", "x", "0", "../x", "a//b", "\0", "\ud800", "x" * 5_000, "1.0", "2.0", "R2"]
_NESTED = [[], {}, [[]], [0], [-1, 5], {"key": "x"}, [None] * 50, {"file": 99, "segments": []}]
HOSTILE: list[Any] = [None, True, False, *_NUMBERS, *_TEXTS, *_NESTED]


def target(data: bytes) -> None:
    """Edit a run, update its digests, read everything, and sometimes verify."""
    if not data:
        return
    mode = "R2" if data[0] & 1 else "R3"
    store = MemoryStore(world(mode))
    if data[0] == 255:
        store.objects[keys.manifest(0)] = data[1:]
    else:
        edit(store, data[0] >> 1, data[1:])
    if data[-1] & 3 == 0:  # not always, because verifying takes as long as reading
        verify(store)
    read(store)


def edit(store: MemoryStore, which: int, data: bytes) -> None:
    """Change a commit or the manifest's rows, and update all digests.

    Args:
        store: Store of the run; it is changed in place.
        which: Selects the commit; one value of `which` selects the manifest's rows instead.
        data: Edits of three bytes each.
    """
    commits = [key for key in sorted(store.objects) if key.endswith(".json")]
    which %= len(commits) + 1
    if which == len(commits):
        edit_rows(store, data)
        return
    body = json.loads(store.objects[commits[which]])
    body.pop(CONTENT_SHA256)
    sign(store, commits[which], edited(body, data))


def edit_rows(store: MemoryStore, data: bytes) -> None:
    """Change values of the manifest's rows, if their types allow the change."""
    rows = read_manifest(MemoryStore(store.objects), 0).rows.to_pylist()
    try:
        table = pa.Table.from_pylist(edited(rows, data), MANIFEST)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError):
        return  # no Parquet file can contain these values
    header = json.loads(store.objects[keys.manifest(0)])
    (file,) = header["files"]
    del store.objects[file["key"]]
    try:
        with FileWriter(store, file["key"], "manifest", MANIFEST) as writer:
            writer.write_table(table)
            written = writer.finish()
    except (pa.ArrowException, UnicodeEncodeError):
        store.objects.pop(file["key"], None)
        return
    sign(store, keys.manifest(0), {**header, "files": [written.to_json()]})


def sign(store: MemoryStore, key: str, body: Any) -> None:
    """Store a commit with its digest, and update the manifest if it contains this digest.

    Args:
        store: Store of the run.
        key: Key of the commit.
        body: Content of the commit.
    """
    if not isinstance(body, dict):
        store.objects[key] = json.dumps(body).encode()
        return
    body.pop(CONTENT_SHA256, None)
    body[CONTENT_SHA256] = content_digest(body)
    store.objects[key] = to_json(body)
    if key != keys.manifest(0):
        manifest = json.loads(store.objects[keys.manifest(0)])
        for ref in manifest["data"]:
            if ref["commit"] == key:
                ref["commit_sha256"] = body[CONTENT_SHA256]
        sign(store, keys.manifest(0), manifest)


def edited(body: Any, data: bytes) -> Any:
    """Return a copy of `body` with some values replaced, removed, duplicated or overwritten."""
    body = copy.deepcopy(body)
    for at in range(0, len(data) - 2, 3):
        where, what = data[at] + 256 * data[at + 1], data[at + 2]
        places = list(_places(body))
        if not places:
            return HOSTILE[what % len(HOSTILE)]
        holder, name = places[where % len(places)]
        if what < 200:
            holder[name] = copy.deepcopy(HOSTILE[what % len(HOSTILE)])
        elif what < 215:
            del holder[name]
        elif what < 235 and isinstance(holder, list):
            holder.insert(name, copy.deepcopy(holder[name]))
        else:
            other, key = places[what * 31 % len(places)]
            holder[name] = copy.deepcopy(other[key])
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in list(items):
        yield value, name
        if isinstance(inner, dict | list):
            yield from _places(inner)


def read(store: MemoryStore) -> None:
    """Read everything that a trainer reads."""
    sealed = open_manifest(store, 0)
    sealed.columns(["id", "group", "reward"])
    share = sealed.select(range(0, sealed.samples, 2))
    read_samples(store, share, share.ids)
    if share.geometry is not None:
        with closing(RouteStream(store, share, share.geometry.layers)) as stream:
            for id in share.ids:
                _ = stream[id]
    used = used_routes(store, 0)
    read_samples(store, used, used.ids)
    read_routes(store, used, used.ids, used.geometry.layers[:1] if used.geometry else None)
    read_routes(store, used, used.ids)


@cache
def world(mode: str) -> dict[str, bytes]:
    """Return the objects of a sealed step: with the engine's routes (R3) or the trainer's (R2)."""
    store = MemoryStore()
    samples = make_samples(prompts=2)
    (sealed_r3 if mode == "R3" else sealed_r2)(store, samples)
    return store.objects


def seeds() -> list[bytes]:
    """Return the initial inputs: an edit of each commit, and two texts for a manifest."""
    found = [bytes([which, 1, 0, 0]) for which in range(20)]
    return [*found, b"\xff{}", b"\xff" + world("R3")[keys.manifest(0)]]


if __name__ == "__main__":
    run(target, seeds())
