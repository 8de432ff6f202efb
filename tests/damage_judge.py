"""Checks of the results that `verify` and the readers return for damaged objects in memory."""

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

REFUSED, NOT_READ = "named and refused", "named, but not read by a trainer"


def outcome(mode: str, damage: Damage) -> str:
    """Check the results of `verify` and the readers, and return REFUSED or NOT_READ."""
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
    """Return whether an object is optional.

    Some commits of a run are optional, because the run removes them or may not have written them
    yet. The metrics of the world's last step are optional as well.
    """
    of_run = key.startswith(("policies/", "checkpoints/", "validations/", "attempts/"))
    is_commit = key.endswith(".json") and not key.endswith(("/config.json", "000/plan.json"))
    return key == keys.metrics(1) or (of_run and is_commit)


def is_named(key: str, problems: list[Problem]) -> bool:
    """Return whether one of the problems names a key, as its object or in its text."""
    return any(problem.key == key or key in problem.text for problem in problems)


@cache
def owners(mode: str) -> dict[str, str]:
    """Return, keyed by data file, the commit that contains the file's digest."""
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
    """Yield everything that a trainer may read from a step, using all reading functions."""
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
    """Return the damaged step, if only one step is damaged and no object is lost.

    Otherwise return None, so that the entire run is verified. This is needed because objects
    elsewhere in the run may refer to a lost object.
    """
    steps = {
        keys.folder_number(key) if new is not None and key.startswith("steps/") else None
        for key, new in damage.changes.items()
    }
    return steps.pop() if len(steps) == 1 else None
