"""Objects damaged by disks, networks and user errors: the kinds of damage in tests/damage.py."""

from collections.abc import Iterator
from functools import cache

from pipeline.run import keys
from tests.damage import KINDS, World, changed_keys, damage_of, world_of
from tests.damage_judge import may_be_absent
from tests.hostile.case import FREE, NAMED, Case, Changes, title
from tests.hostile.worlds import twin, world

TIMES = 3
"""The number of times that each kind is applied to each object."""


@cache
def _world(name: str) -> World:
    return world_of(world(name), twin(name, True))


def cases(name: str) -> Iterator[Case]:
    """Yield TIMES cases for each kind of damage to each object of a world that has a twin."""
    for kind in KINDS:
        for key in sorted(world(name)):
            for number in range(TIMES):
                absent = kind == "lost" and (may_be_absent(key) or _of_no_run(key, name))
                yield Case(
                    f"damaged/{name}:{title(key)}/{kind} {number}/L0",
                    name,
                    lambda kind=kind, key=key, number=number: _changed(name, kind, key, number),
                    FREE if absent else NAMED,
                )


def _of_no_run(key: str, name: str) -> bool:
    return keys.run_json() not in world(name) and key.endswith("plan.json")


def _changed(name: str, kind: str, key: str, number: int) -> Changes | None:
    if kind == "lost" and number:
        return None
    found = damage_of(_world(name), kind, key, number)
    if found is None or not changed_keys(world(name), found.changes):
        return None
    return found.changes
