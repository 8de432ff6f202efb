"""What can happen to stored objects, and a store small enough to try it thousands of times.

A case is a kind and the objects that changed: key -> new bytes, None for a lost object.
"""

import io
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

from pipeline.store import keys
from pipeline.store.commit import CONTENT_SHA256
from pipeline.traces import Geometry, Sample
from pipeline.traces.records import Provenance
from pipeline.traces.writer import write_shard
from tests.memory_store import MemoryStore
from tests.unit.traces.make import make_samples
from tests.unit.traces.runs import whole_run, write_step

Objects = Mapping[str, bytes]


@dataclass(frozen=True)
class Damage:
    """A case. Example: Damage('bit flipped', {'steps/000000/manifest.json': b'...'})."""

    kind: str
    changes: Mapping[str, bytes | None]

    def __repr__(self) -> str:
        """Short: kind, and of each object its name and the new size."""
        sizes = {key: None if new is None else len(new) for key, new in self.changes.items()}
        return f"Damage({self.kind!r}, sizes={sizes})"


@dataclass(frozen=True)
class World:
    """An undamaged run, its samples by step, and objects of others to take from."""

    objects: Objects
    samples: Mapping[int, list[Sample]]
    foreign: Mapping[str, bytes]
    """By what they are: 'another geometry', 'garbage', ..."""


@cache
def world(mode: str) -> World:
    """A run of two steps: the first with the engine's routes (R3) or the trainer's (R2)."""
    with ExitStack() as small:
        # Small files get several row groups each.
        for name, size in (("segments.ROW_GROUP_TOKENS", 16), ("rows.ROW_GROUP_TOKENS", 16)):
            small.enter_context(patch(f"pipeline.traces.{name}", size))
        small.enter_context(patch("pipeline.traces.seal.ROW_GROUP_SAMPLES", 2))
        run, other = MemoryStore(), MemoryStore()
        for store in (run, other):
            with TemporaryDirectory() as scratch:
                whole_run(store, Path(scratch), mode)
            write_step(store, 1)
        foreign = _foreign()
    samples = {0: make_samples(), 1: make_samples(step=1, seed=1)}
    for key, data in other.objects.items():
        foreign[f"another run's {key}"] = data
    return World(dict(run.objects), samples, foreign)


def damages(world: World) -> st.SearchStrategy[Damage]:
    """One object damaged in any way, or two that changed places."""
    return st.one_of(
        *(_one(world, kind, change) for kind, change in _CHANGES.items()),
        _swapped(world),
        _ranges_swapped(world),
        _taken(world, "another object of the run", world.objects),
        _taken(world, "foreign", world.foreign),
        st.sampled_from(sorted(world.objects)).map(lambda key: Damage("lost", {key: None})),
    )


def same_content(key: str, old: bytes | None, new: bytes | None) -> bool:
    """Whether a change is without effect: the same bytes, or JSON that says the same."""
    if old == new or old is None or new is None or not key.endswith(".json"):
        return old == new
    try:
        said = [json.loads(data) for data in (old, new)]
    except (ValueError, RecursionError):
        return False
    if not all(isinstance(body, dict) for body in said):
        return False
    for body in said:  # who made it is no content, if all that it says is the same
        for name in ("attempt", CONTENT_SHA256):
            body.pop(name, None)
    return json.dumps(said[0], sort_keys=True) == json.dumps(said[1], sort_keys=True)


def _cut(data: bytes, draw: Callable[..., int]) -> bytes:
    return data[: draw(0, len(data) - 1)]


def _cut_in_front(data: bytes, draw: Callable[..., int]) -> bytes:
    return data[draw(1, len(data)) :]


def _flipped(data: bytes, draw: Callable[..., int]) -> bytes:
    changed = bytearray(data)
    for _ in range(draw(1, 3)):
        changed[draw(0, len(data) - 1)] ^= 1 << draw(0, 7)
    return bytes(changed)


def _inserted(data: bytes, draw: Callable[..., int]) -> bytes:
    at = draw(0, len(data))
    return data[:at] + bytes(draw(0, 255) for _ in range(draw(1, 4))) + data[at:]


def _zeroed(data: bytes, draw: Callable[..., int]) -> bytes:
    at = draw(0, len(data) - 1)
    end = min(len(data), at + draw(1, 64))
    return data[:at] + bytes(end - at) + data[end:]


def _doubled(data: bytes, draw: Callable[..., int]) -> bytes:
    at = draw(0, len(data) - 1)
    end = min(len(data), at + draw(1, 256))
    return data[:end] + data[at:end] + data[end:]


def _moved(data: bytes, draw: Callable[..., int]) -> bytes:
    """Two blocks of the object in each other's place."""
    size = draw(1, max(1, len(data) // 3))
    one = draw(0, max(0, len(data) // 2 - size))
    two = draw(len(data) // 2, max(len(data) // 2, len(data) - size))
    changed = bytearray(data)
    a, b = data[one : one + size], data[two : two + size]
    changed[one : one + len(b)] = b
    changed[two : two + len(a)] = a
    return bytes(changed)


_CHANGES: dict[str, Callable[[bytes, Callable[..., int]], bytes]] = {
    "cut": _cut,
    "cut in front": _cut_in_front,
    "bits flipped": _flipped,
    "bytes inserted": _inserted,
    "zeroed": _zeroed,
    "doubled": _doubled,
    "moved": _moved,
}


def _one(
    world: World, kind: str, change: Callable[[bytes, Callable[..., int]], bytes]
) -> st.SearchStrategy[Damage]:
    @st.composite
    def strategy(draw: st.DrawFn) -> Damage:
        key = draw(st.sampled_from(sorted(world.objects)))
        new = change(world.objects[key], lambda low, high: draw(st.integers(low, high)))
        return Damage(kind, {key: new})

    return strategy()


@st.composite
def _swapped(draw: st.DrawFn, world: World) -> Damage:
    """Of the same kind (shards, steps, ranks) or of any."""
    one = draw(st.sampled_from(sorted(world.objects)))
    alike = [key for key in sorted(world.objects) if key.split(".")[-2:] == one.split(".")[-2:]]
    two = draw(st.sampled_from(alike) | st.sampled_from(sorted(world.objects)))
    return Damage("swapped", {one: world.objects[two], two: world.objects[one]})


@st.composite
def _ranges_swapped(draw: st.DrawFn, world: World) -> Damage:
    """Bytes of two objects in each other's place, most of them column chunks."""
    parquet = [key for key in sorted(world.objects) if key.endswith(".parquet")]
    one, two = draw(st.sampled_from(parquet)), draw(st.sampled_from(parquet))
    data = [bytearray(world.objects[key]) for key in (one, two)]
    at = [draw(st.integers(0, len(d) - 1)) for d in data]
    size = draw(st.integers(1, 200))
    pieces = [bytes(d[i : i + size]) for d, i in zip(data, at, strict=True)]
    data[0][at[0] : at[0] + size] = pieces[1]
    if one == two:
        return Damage("ranges swapped", {one: bytes(data[0])})
    data[1][at[1] : at[1] + size] = pieces[0]
    return Damage("ranges swapped", {one: bytes(data[0]), two: bytes(data[1])})


@st.composite
def _taken(draw: st.DrawFn, world: World, kind: str, others: Mapping[str, bytes]) -> Damage:
    """Another object in the place of one: any, or one of the same kind."""
    key = draw(st.sampled_from(sorted(world.objects)))
    alike = [name for name in sorted(others) if name.split(".")[-2:] == key.split(".")[-2:]]
    name = draw(st.sampled_from(sorted(others)) | st.sampled_from(alike or sorted(others)))
    return Damage(kind, {key: others[name]})


def _foreign() -> dict[str, bytes]:
    """Files that have no business here."""
    found = {"empty": b"", "garbage": np.random.default_rng(0).bytes(999), "JSON": b"{}\n"}
    out = io.BytesIO()
    pq.write_table(pa.table({"id": ["a"], "owner": ["b"]}), out)
    found["plain.parquet"] = out.getvalue()
    geometry = Geometry(experts=300, topk=5, layers=(0, 1, 2, 5))
    made = Provenance("R3", 0, "vllm 0.32.0")
    store = MemoryStore()
    write_shard(store, 0, 0, "0" * 8, make_samples(geometry=geometry), geometry, made)
    with patch("pipeline.traces.schema.FORMAT", "2.0"):
        write_shard(store, 1, 0, "0" * 8, make_samples(), Geometry(16, 4, (1, 2, 5)), made)
    names = {0: "another geometry's", 1: "a newer format's"}
    for key, data in store.objects.items():
        found[f"{names[keys.folder_number(key) or 0]} {key}"] = data
    return found
