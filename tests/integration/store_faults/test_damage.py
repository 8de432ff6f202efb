"""Thousands of damaged runs: each damaged object is named, and nobody takes it for the truth."""

import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.traces.damage import Damage, damages, world
from tests.unit.traces.judge import outcome

pytestmark = pytest.mark.integration


def table(mode: str, counts: Counter[tuple[str, str]]) -> str:
    lines = [f"\n{mode}: {counts.total()} cases of damage, 0 accepted wrong"]
    lines += [f"  {kind:28} {what:30} {n:5}" for (kind, what), n in sorted(counts.items())]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("mode", ["R3", "R2"])
def test_no_damage_is_taken_for_the_truth(mode, capsys):
    """Over a thousand cases: verify names each damaged object; whoever reads gets the true rows or
    an error of ours, and nothing else ever comes out."""
    counts: Counter[tuple[str, str]] = Counter()

    @settings(max_examples=1_350, deadline=None, suppress_health_check=list(HealthCheck))
    @given(damages(world(mode)))
    def check(damage: Damage) -> None:
        counts[damage.kind, outcome(mode, damage)] += 1

    check()
    with capsys.disabled():
        sys.stdout.write(table(mode, counts))
    effective = sum(n for (_, what), n in counts.items() if what != "without effect")
    assert effective >= 1_000
