"""What `verify` and the readers make of damage, and whether that is right."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from pipeline.store import StoreError, keys
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
from pipeline.traces.problems import Problem
from pipeline.traces.verify import verify
from tests.memory_store import MemoryStore
from tests.unit.traces.damage import Damage, same_content, world


def truth(store, step: int) -> Iterator[Any]:
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


@cache
def expected(mode: str) -> dict[int, list[Any]]:
    store = MemoryStore(world(mode).objects)
    assert not verify(store).problems
    return {step: list(truth(store, step)) for step in (0, 1)}


@cache
def owners(mode: str) -> dict[str, str]:
    """By data file, the commit that says what it should hold."""
    found = {}
    for key, data in world(mode).objects.items():
        if key.endswith(".json") and keys.maker_of(key) is None and b'"attempt"' in data:
            for name in re.findall(rb'"key": "([^"]+)"', data):
                if not key.endswith("manifest.json") or b"/manifest." in name:
                    found[name.decode()] = key
    return found


def may_be_absent(key: str) -> bool:
    """Commits of what a run removes, or may not have made yet; of two steps the last metrics."""
    of_run = key.startswith(("policies/", "checkpoints/", "validations/", "attempts/"))
    return key == keys.metrics(1) or (of_run and key.endswith(".json"))


def is_named(key: str, problems: list[Problem]) -> bool:
    """As a problem's object, or in its text: 'X is missing, Y names it'."""
    return any(problem.key == key or key in problem.text for problem in problems)


def _step_to_verify(damage: Damage) -> int | None:
    """The one step that is touched, as the rest is good; what is lost may be missed elsewhere."""
    steps = {
        keys.folder_number(key) if new is not None and key.startswith("steps/") else None
        for key, new in damage.changes.items()
    }
    return steps.pop() if len(steps) == 1 else None


def outcome(mode: str, damage: Damage) -> str:
    """What verify and the readers make of a case; asserts that it is right."""
    whole = world(mode).objects
    changed = {k for k, new in damage.changes.items() if not same_content(k, whole.get(k), new)}
    objects = {**whole, **damage.changes}
    store = MemoryStore({key: data for key, data in objects.items() if data is not None})
    problems = verify(store, _step_to_verify(damage)).problems
    for key in changed:
        if damage.changes[key] is None and may_be_absent(key):
            continue
        if owners(mode).get(key) not in changed:
            assert is_named(key, problems), (damage.kind, key, problems)
    refused = False
    for step in {keys.folder_number(key) for key in damage.changes if key.startswith("steps/")}:
        try:
            for found, right in zip(truth(store, step), expected(mode)[step], strict=True):
                assert found == right, (damage.kind, sorted(changed), step)
        except (TraceError, StoreError):
            refused = True
    if not changed:
        return "without effect"
    return "named and refused" if refused else "named, not read by a trainer"
