"""The kinds of damage to stored objects, applied to every object of a small run.

Five test modules check that damaged content is never accepted:

    tests/unit/traces/test_damage.py                     Readers and `verify` in memory: some cases.
    tests/integration/traces/test_damage.py              Readers and `verify`: all cases.
    tests/integration/traces/test_damaged_stores.py      The commands, on files and on S3.
    tests/integration/traces/test_damaged_training.py    Training ranks, and the data for a restart.
    tests/hostile/families/damaged.py                    Cases of the hostile campaign.

Other tests use files as a broken or hostile writer could produce them. Their digests all match:
tests/unit/traces/read/test_forged_files.py, test_hostile.py and fuzz/.
"""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.run.commit import CONTENT_SHA256
from pipeline.traces import Geometry
from pipeline.traces.format.schema import FORMAT
from pipeline.traces.format.types import Provenance
from pipeline.traces.write.writer import write_shard
from tests.memory_store import MemoryStore
from tests.samples import make_samples
from tests.stored_runs import whole_run, write_step

Objects = Mapping[str, bytes]
Changes = dict[str, bytes | None]
"""The new bytes of each changed object, keyed by object key; None for a lost object."""


@dataclass(frozen=True)
class World:
    """An undamaged run, and foreign objects that may replace its objects."""

    objects: Objects
    foreign: Mapping[str, Objects]
    """The foreign objects, keyed first by kind of damage, then by name.

    The name of a foreign object ends like the keys of the objects that it resembles.
    """


@dataclass(frozen=True)
class Damage:
    """A case of damage.

    Example: Damage('cut', 'steps/000000/manifest.json', 0, {...: b'...'}).
    """

    kind: str
    """The name of the kind in KINDS."""
    key: str
    """The key of the damaged object; `changes` may also contain a second object."""
    number: int
    changes: Changes

    def __repr__(self) -> str:
        """Return a short form, with the new size of each changed object."""
        sizes = {key: None if new is None else len(new) for key, new in self.changes.items()}
        return f"Damage({self.kind!r}, {self.key!r}, {self.number}, sizes={sizes})"

    def of(self, objects: Objects) -> dict[str, bytes]:
        """Return a copy of the objects with this damage."""
        return {k: data for k, data in {**objects, **self.changes}.items() if data is not None}


@cache
def world(mode: str) -> World:
    """Return a run of two steps.

    The first step has the engine's routes (R3) or the trainer's (R2). The second step has the
    engine's routes and, in R2, also the trainer's.
    """
    with ExitStack() as small:
        # Give even small files several row groups.
        for name, size in (("segments.ROW_GROUP_TOKENS", 16), ("rows.ROW_GROUP_TOKENS", 16)):
            small.enter_context(patch(f"pipeline.traces.write.{name}", size))
        small.enter_context(patch("pipeline.traces.write.seal.ROW_GROUP_SAMPLES", 2))
        run, other = MemoryStore(), MemoryStore()
        for store in (run, other):
            with TemporaryDirectory() as scratch:
                whole_run(store, Path(scratch), mode)
            write_step(store, 1, mode)
        return world_of(run.objects, other.objects)


def world_of(run: Objects, other: Objects) -> World:
    """Return a run, with foreign objects from another run and from different writers."""
    return World(
        dict(run),
        {
            "another object of the run": dict(run),
            "another run's": dict(other),
            "another geometry's": _shard_of(Geometry(300, 5, (0, 1, 2, 5)), FORMAT),
            "a newer format's": _shard_of(Geometry(16, 4, (1, 2, 5)), "2.0"),
            "no trace": _no_trace(),
        },
    )


def damages(mode: str, kinds: Iterable[str], numbers: Iterable[int] = (0,)) -> Iterator[Damage]:
    """Yield damage of each kind to every object of a run, once for each number.

    Cases without an effect are left out; for example, ranges are swapped only in Parquet files. For
    objects with the same names and sizes, the same arguments lead to damage in the same places.

    Args:
        mode: The run's routes: "R2" or "R3".
        kinds: Names in KINDS.
        numbers: The numbers of the cases for each kind and object.
    """
    for kind in kinds:
        for key in sorted(world(mode).objects):
            for number in numbers:
                damage = damage_of(world(mode), kind, key, number)
                if damage is not None:
                    yield damage


def damage_of(world: World, kind: str, key: str, number: int) -> Damage | None:
    """Return damage to one object; None if the kind has no effect on it.

    Args:
        world: The undamaged run, and foreign objects.
        kind: A name in KINDS.
        key: The object to damage.
        number: The number of the case. Cases with different numbers damage different places.
    """
    rng = Random(f"{kind} {sorted(world.objects).index(key)} {number}")
    tries = (KINDS[kind](world, key, rng) for _ in range(20))
    changes = next((c for c in tries if changed_keys(world.objects, c)), None)
    return None if changes is None else Damage(kind, key, number, changes)


def changed_keys(objects: Objects, changes: Changes) -> set[str]:
    """Return the keys of the objects whose content changed; equivalent JSON counts as unchanged."""
    return {key for key, new in changes.items() if not _same_content(key, objects[key], new)}


def _same_content(key: str, old: bytes, new: bytes | None) -> bool:
    if old == new or new is None or not key.endswith(".json"):
        return old == new
    try:
        bodies = [json.loads(data) for data in (old, new)]
    except (ValueError, RecursionError):
        return False
    if not all(isinstance(body, dict) for body in bodies):
        return False
    for body in bodies:  # an object's writer does not count as content
        for name in ("attempt", CONTENT_SHA256):
            body.pop(name, None)
    return json.dumps(bodies[0], sort_keys=True) == json.dumps(bodies[1], sort_keys=True)


def _cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _cut_in_front(data: bytes, rng: Random) -> bytes:
    return data[rng.randint(1, len(data)) :]


def _bits_flipped(data: bytes, rng: Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _bytes_inserted(data: bytes, rng: Random) -> bytes:
    at = rng.randint(0, len(data))
    return data[:at] + rng.randbytes(rng.randint(1, 4)) + data[at:]


def _zeroed(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.randint(1, 64))
    return data[:at] + bytes(end - at) + data[end:]


def _doubled(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.randint(1, 256))
    return data[:end] + data[at:end] + data[end:]


def _shuffled(data: bytes, rng: Random) -> bytes:
    """Swap two blocks of the object."""
    size = rng.randint(1, max(1, len(data) // 3))
    one = rng.randint(0, max(0, len(data) // 2 - size))
    two = rng.randint(len(data) // 2, max(len(data) // 2, len(data) - size))
    changed = bytearray(data)
    a, b = data[one : one + size], data[two : two + size]
    changed[one : one + len(b)] = b
    changed[two : two + len(a)] = a
    return bytes(changed)


def _in_itself(
    change: Callable[[bytes, Random], bytes], world: World, key: str, rng: Random
) -> Changes:
    return {key: change(world.objects[key], rng)}


def _swapped(world: World, key: str, rng: Random) -> Changes:
    """Swap the object with another one, of the same kind (shards, steps, ranks) or of any kind."""
    other = rng.choice(_alike(key, world.objects) if rng.random() < 0.5 else sorted(world.objects))
    return {key: world.objects[other], other: world.objects[key]}


def _ranges_swapped(world: World, key: str, rng: Random) -> Changes:
    """Swap bytes of two Parquet files, or copy bytes within one; most are in column chunks."""
    if not key.endswith(".parquet"):
        return {}
    other = rng.choice([name for name in sorted(world.objects) if name.endswith(".parquet")])
    data = [bytearray(world.objects[name]) for name in (key, other)]
    at = [rng.randrange(len(d)) for d in data]
    size = rng.randint(1, 200)
    pieces = [bytes(d[i : i + size]) for d, i in zip(data, at, strict=True)]
    data[0][at[0] : at[0] + size] = pieces[1]
    if key == other:
        return {key: bytes(data[0])}
    data[1][at[1] : at[1] + size] = pieces[0]
    return {key: bytes(data[0]), other: bytes(data[1])}


def _replaced(kind: str, world: World, key: str, rng: Random) -> Changes:
    """Replace the object with a foreign one, of the same kind or of any kind."""
    others = world.foreign[kind]
    alike = _alike(key, others)
    name = rng.choice(alike if alike and rng.random() < 0.5 else sorted(others))
    return {key: others[name]}


def _lost(_world: World, key: str, _rng: Random) -> Changes:
    return {key: None}


def _alike(key: str, names: Iterable[str]) -> list[str]:
    return [name for name in sorted(names) if name.split(".")[-2:] == key.split(".")[-2:]]


KINDS: dict[str, Callable[[World, str, Random], Changes]] = {
    "cut": partial(_in_itself, _cut),
    "cut in front": partial(_in_itself, _cut_in_front),
    "bits flipped": partial(_in_itself, _bits_flipped),
    "bytes inserted": partial(_in_itself, _bytes_inserted),
    "zeroed": partial(_in_itself, _zeroed),
    "doubled": partial(_in_itself, _doubled),
    "shuffled": partial(_in_itself, _shuffled),
    "swapped": _swapped,
    "ranges swapped": _ranges_swapped,
    "another object of the run": partial(_replaced, "another object of the run"),
    "another run's": partial(_replaced, "another run's"),
    "another geometry's": partial(_replaced, "another geometry's"),
    "a newer format's": partial(_replaced, "a newer format's"),
    "no trace": partial(_replaced, "no trace"),
    "lost": _lost,
}
"""The functions that damage an object of a run, and possibly a second one, keyed by kind."""


def _shard_of(geometry: Geometry, format: str) -> Objects:
    store, made = MemoryStore(), Provenance("R3", 0, "vllm 0.32.0")
    with patch("pipeline.traces.format.schema.FORMAT", format):
        write_shard(store, 0, 0, "0" * 8, make_samples(geometry=geometry), geometry, made)
    return store.objects


def _no_trace() -> Objects:
    out = io.BytesIO()
    pq.write_table(pa.table({"id": ["a"], "owner": ["b"]}), out)
    garbage = np.random.default_rng(0).bytes(999)
    return {"empty": b"", "garbage": garbage, "JSON": b"{}\n", "plain.parquet": out.getvalue()}
