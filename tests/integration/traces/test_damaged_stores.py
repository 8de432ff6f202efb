"""Damage in real stores: `retrace traces verify` names it, and no reader accepts it."""

from collections.abc import Iterator
from itertools import groupby

import pytest

from pipeline.run import keys
from pipeline.store import Store, StoreError, open_store
from pipeline.traces import TraceError
from pipeline.upkeep.verify import verify
from tests.damage import KINDS, Damage, damages, world
from tests.damage_judge import expected, may_be_absent, owners, truth
from tests.exhaustive import sample_or_all
from tests.integration.traces.test_commands import command

pytestmark = pytest.mark.integration


def fill(store: Store, mode: str) -> None:
    """Write an undamaged run."""
    for key, data in world(mode).objects.items():
        store.create(key, data)


def put(store: Store, changes: dict[str, bytes | None]) -> None:
    """Replace objects; None removes an object."""
    for key, data in changes.items():
        store.delete(key)
        if data is not None:
            store.create(key, data)


def undo(store: Store, mode: str, damage: Damage) -> None:
    """Restore the objects that a case of damage has changed.

    Args:
        store: The store.
        mode: The mode of the undamaged run: R2 or R3.
        damage: The case of damage.
    """
    put(store, {key: world(mode).objects[key] for key in damage.changes})


def one_of_each_object(mode: str) -> Iterator[Damage]:
    """Yield one kind of damage to each object, in rotation, or all kinds in make test-all."""
    cases = sorted(damages(mode, KINDS), key=lambda damage: damage.key)
    for number, (_, found) in enumerate(groupby(cases, lambda damage: damage.key)):
        of_key = list(found)
        yield from sample_or_all([of_key[number % len(of_key)]], of_key)


@pytest.mark.parametrize("mode", ["R3", "R2"])
def test_verify_names_each_damaged_object(place, mode):
    """For each damaged object, the command exits with 1 and prints a line with the object's key."""
    store = open_store(place)
    fill(store, mode)
    (good,) = command("verify", place)
    assert good.startswith("all good; checked: 2 sealed steps, 12 samples, ")
    for damage in one_of_each_object(mode):
        put(store, damage.changes)
        if damage.kind == "lost" and may_be_absent(damage.key):
            assert command("verify", place)[0].startswith("all good; ")
        else:
            lines = command("verify", place, expect=1)
            named = {damage.key, owners(mode).get(damage.key)} & set(damage.changes)
            assert any(key in line for key in named for line in lines), (damage, lines)
            assert lines[-1].startswith("problems: ")
        undo(store, mode, damage)
    assert command("verify", place) == [good]


def test_readers_refuse_damaged_objects(place):
    """Readers of a damaged step raise an error if they read the damaged part.

    Otherwise, they return the true rows.
    """
    store = open_store(place)
    fill(store, "R3")
    kinds = sample_or_all(("cut", "bits flipped", "no trace", "lost"), tuple(KINDS))
    for damage in damages("R3", kinds):
        if not damage.key.startswith(keys.step_prefix(0)):
            continue
        if damage.key in (keys.plan(0), keys.metrics(0)):
            continue
        put(store, damage.changes)
        try:
            for found, right in zip(truth(store, 0), expected("R3")[0], strict=True):
                assert found == right, damage
            assert damage.kind not in ("cut", "no trace", "lost"), damage
        except (TraceError, StoreError):
            assert verify(store).problems, damage
        undo(store, "R3", damage)
    assert not verify(store).problems
