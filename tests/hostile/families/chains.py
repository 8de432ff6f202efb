"""Damaged chains of policy versions: objects lost, swapped, or from another chain."""

from collections.abc import Iterator
from functools import cache

from pipeline.run import keys
from tests.hostile.case import FREE, NAMED, Case, Changes, title
from tests.hostile.remake import remade
from tests.hostile.worlds import Objects, world
from tests.memory_store import MemoryStore
from tests.policies import write_chain


def cases(name: str) -> Iterator[Case]:
    """Yield cases with policy objects lost, swapped, or replaced by those of another chain."""
    mine = [key for key in sorted(world(name)) if key.startswith(keys.policies())]
    newest = max(key for key in mine if key.endswith("policy.json"))
    for key in mine:
        # Retention removes the newest version of a chain first.
        yield Case(
            f"chains/{name}:{title(key)}/lost/L0",
            name,
            lambda key=key: {key: None},
            FREE if key == newest else NAMED,
        )
        for level in ("L0", "L1"):
            yield Case(
                f"chains/{name}:{title(key)}/from another chain/{level}",
                name,
                lambda key=key, level=level: _of_twin(name, key, level),
            )
            for other in mine:
                if key < other and key.split("/")[-1] == other.split("/")[-1]:
                    yield Case(
                        f"chains/{name}:{title(key)}/swapped with {title(other)}/{level}",
                        name,
                        lambda pair=(key, other), level=level: _swapped(name, pair, level),
                    )


@cache
def _twin(name: str) -> Objects:
    """Return the same policy versions with different weights, under the same keys."""
    store, mine = MemoryStore(), sorted(world(name))
    write_chain(store, 3, 3, seed=40)
    found = {}
    for key, data in store.objects.items():
        version, *_, last = key.split("/")[1:]
        same = [k for k in mine if k.startswith(f"policies/{version}/") and k.endswith("/" + last)]
        found |= dict.fromkeys(same, data)
    return found


def _of_twin(name: str, key: str, level: str) -> Changes | None:
    if _twin(name)[key] == world(name)[key]:
        return None
    changes = {key: _twin(name)[key]}
    return changes if level == "L0" else remade(world(name), changes)


def _swapped(name: str, pair: tuple[str, str], level: str) -> Changes | None:
    one, two = pair
    objects = world(name)
    if objects[one] == objects[two]:
        return None
    changes = {one: objects[two], two: objects[one]}
    return changes if level == "L0" else remade(objects, changes)
