"""After any damage to an object, a reader returns the correct rows or raises an error, and `verify`
names the object."""

from itertools import combinations, islice

import pytest

from pipeline.run import keys
from pipeline.upkeep.verify import verify
from tests.damage import KINDS, Damage, damages, world
from tests.damage_judge import REFUSED, may_be_absent, outcome
from tests.memory_store import MemoryStore

pytestmark = pytest.mark.parametrize("mode", ["R3", "R2"])


def test_damaged_data_is_never_returned(mode):
    """This tries a few cases of every kind; tests/integration/traces/test_damage.py tries all."""
    cases = list(islice(damages(mode, KINDS), 0, None, 8))
    assert {damage.kind for damage in cases} == set(KINDS)
    for damage in cases:
        outcome(mode, damage)


@pytest.mark.parametrize("kind", ["cut", "bits flipped", "lost"])
def test_only_the_damaged_object_is_named(mode, kind):
    """Verify does not name a lost commit that an unfinished or pruned run also lacks."""
    for damage in damages(mode, [kind]):
        store = MemoryStore(damage.of(world(mode).objects))
        named = {problem.key for problem in verify(store).problems}
        absent = kind == "lost" and may_be_absent(damage.key)
        assert named == (set() if absent else {damage.key}), damage


def test_a_step_without_one_of_its_objects_is_refused(mode):
    needless = {of_step(step) for step in (0, 1) for of_step in (keys.plan, keys.metrics)}
    lost = [d for d in damages(mode, ["lost"]) if d.key.startswith("steps/")]
    assert len(lost) > 16
    for damage in lost:
        if damage.key not in needless:
            assert outcome(mode, damage) == REFUSED, damage


@pytest.mark.parametrize("suffix", [".json", ".samples.parquet", ".routes.parquet"])
def test_swapped_objects_of_a_step_are_refused(mode, suffix):
    """The swapped objects have the same totals."""
    objects = world(mode).objects
    makers = (keys.step_prefix(0) + "rollout/", keys.step_prefix(0) + "training/")
    alike = [key for key in sorted(objects) if key.startswith(makers) and key.endswith(suffix)]
    pairs = list(combinations(alike, 2))
    assert pairs or (mode, suffix) == ("R2", ".samples.parquet")  # R2 has only one shard
    for one, two in pairs:
        changes = {one: objects[two], two: objects[one]}
        assert outcome(mode, Damage("swapped", one, 0, changes)) == REFUSED, (one, two)
