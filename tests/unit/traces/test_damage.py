"""Whatever happens to an object, a reader gives the right rows or an error, never wrong rows; and
`verify` names it."""

from itertools import combinations, islice

import pytest

from pipeline.run import keys
from pipeline.upkeep.verify import verify
from tests.damage import KINDS, Damage, damages, world
from tests.damage_judge import REFUSED, may_be_absent, outcome
from tests.memory_store import MemoryStore

pytestmark = pytest.mark.parametrize("mode", ["R3", "R2"])


def test_no_damage_is_taken_for_the_truth(mode):
    """Some cases of every kind; tests/integration/traces/test_damage.py tries all."""
    cases = list(islice(damages(mode, KINDS), 0, None, 8))
    assert {damage.kind for damage in cases} == set(KINDS)
    for damage in cases:
        outcome(mode, damage)


@pytest.mark.parametrize("kind", ["cut", "bits flipped", "lost"])
def test_each_object_is_named_and_no_other_is_blamed(mode, kind):
    """But for commits without which a run is a run: an unfinished one, or one that was pruned."""
    for damage in damages(mode, [kind]):
        store = MemoryStore(damage.of(world(mode).objects))
        named = {problem.key for problem in verify(store).problems}
        absent = kind == "lost" and may_be_absent(damage.key)
        assert named == (set() if absent else {damage.key}), damage


def test_a_step_is_refused_without_one_of_its_objects(mode):
    needless = {of_step(step) for step in (0, 1) for of_step in (keys.plan, keys.metrics)}
    lost = [d for d in damages(mode, ["lost"]) if d.key.startswith("steps/")]
    assert len(lost) > 16
    for damage in lost:
        if damage.key not in needless:
            assert outcome(mode, damage) == REFUSED, damage


@pytest.mark.parametrize("suffix", [".json", ".samples.parquet", ".routes.parquet"])
def test_objects_of_a_step_in_each_others_place_are_refused(mode, suffix):
    """The totals are all equal."""
    objects = world(mode).objects
    makers = (keys.step_prefix(0) + "rollout/", keys.step_prefix(0) + "training/")
    alike = [key for key in sorted(objects) if key.startswith(makers) and key.endswith(suffix)]
    pairs = list(combinations(alike, 2))
    assert pairs or (mode, suffix) == ("R2", ".samples.parquet")  # it has one shard of samples
    for one, two in pairs:
        changes = {one: objects[two], two: objects[one]}
        assert outcome(mode, Damage("swapped", one, 0, changes)) == REFUSED, (one, two)
