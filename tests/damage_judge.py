"""What `verify` and the readers make of damage in memory, and whether that is right."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from pipeline.run import keys
from pipeline.store import Store, StoreError
from pipeline.traces import (
    Routes,
    Sample,
    TraceError,
    open_manifest,
    read_manifest,
    read_routes,
    read_samples,
    used_routes,
)
from pipeline.upkeep.problems import Problem
from pipeline.upkeep.verify import verify
from tests.damage import Damage, changed_keys, world
from tests.memory_store import MemoryStore

REFUSED, NOT_READ = "named and refused", "named, not read by a trainer"


def outcome(mode: str, damage: Damage) -> str:
    """What verify and the readers make of a case; asserts that it is right."""
    whole = world(mode).objects
    changed = changed_keys(whole, damage.changes)
    store = MemoryStore(damage.of(whole))
    problems = verify(store, _step_to_verify(damage)).problems
    for key in changed:
        if damage.changes[key] is None and may_be_absent(key):
            continue
        if owners(mode).get(key) not in changed:
            assert is_named(key, problems), (damage, key, problems)
    refused = False
    for step in {keys.folder_number(key) for key in damage.changes if key.startswith("steps/")}:
        try:
            for found, right in zip(truth(store, step), expected(mode)[step], strict=True):
                assert found == right, (damage, step)
        except (TraceError, StoreError):
            refused = True
    return REFUSED if refused else NOT_READ


def may_be_absent(key: str) -> bool:
    """Commits of what a run removes, or may not have made yet; of two steps the last metrics."""
    of_run = key.startswith(("policies/", "checkpoints/", "validations/", "attempts/"))
    is_commit = key.endswith(".json") and not key.endswith(("/config.json", "000/plan.json"))
    return key == keys.metrics(1) or (of_run and is_commit)


def is_named(key: str, problems: list[Problem]) -> bool:
    """As a problem's object, or in its text: 'X is missing, Y names it'."""
    return any(problem.key == key or key in problem.text for problem in problems)


@cache
def owners(mode: str) -> dict[str, str]:
    """By data file, the commit that says what it should hold."""
    found = {}
    for key, data in world(mode).objects.items():
        if key.endswith(".json") and b'"attempt"' in data:
            for name in re.findall(rb'"key": "([^"]+)"', data):
                if not key.endswith("manifest.json") or b"/manifest." in name:
                    found[name.decode()] = key
    return found


@cache
def expected(mode: str) -> dict[int, list[Any]]:
    store = MemoryStore(world(mode).objects)
    assert not verify(store).problems
    return {step: list(truth(store, step)) for step in (0, 1)}


def truth(store: Store, step: int) -> Iterator[Any]:
    """Everything that a trainer may ask for of a step, in any way that it may ask."""
    sealed = open_manifest(store, step)
    yield sealed.samples
    yield sealed.columns(["id", "group", "reward", "rows_total"]).to_pylist()
    manifest = read_manifest(store, step)
    yield manifest.rows.to_pylist()
    yield [vars_of(sample) for sample in read_samples(store, manifest, manifest.ids)]
    share = sealed.select(range(sealed.samples - 1, -1, -2))
    yield share.ids
    yield [vars_of(sample) for sample in read_samples(store, share, share.ids[:1])]
    used = used_routes(store, step)
    for ids, layers in ((used.ids, None), (used.ids, (2, 1)), (used.ids[1:3], (5,))):
        yield [lists_of(routes) for routes in read_routes(store, used, ids, layers).values()]
    if manifest.geometry is not None:
        yield [lists_of(routes) for routes in read_routes(store, share, share.ids, (2,)).values()]


def vars_of(sample: Sample) -> dict[str, Any]:
    values = vars(sample)
    return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}


def lists_of(routes: Routes) -> tuple[Any, Any]:
    return routes.sets_TLK.tolist(), routes.valid_T.tolist()


def _step_to_verify(damage: Damage) -> int | None:
    """The one step that is touched, as the rest is good; what is lost may be missed elsewhere."""
    steps = {
        keys.folder_number(key) if new is not None and key.startswith("steps/") else None
        for key, new in damage.changes.items()
    }
    return steps.pop() if len(steps) == 1 else None
