"""Thousands of damaged runs: each damaged object is named, and nobody takes it for the truth."""

import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.damage import KINDS, Damage, damages
from tests.damage_judge import outcome
from tests.exhaustive import sample_or_all

pytestmark = pytest.mark.integration


def table(mode: str, counts: Counter[tuple[str, str]]) -> str:
    lines = [f"\n{mode}: {counts.total()} cases of damage, 0 accepted wrong"]
    lines += [f"  {kind:28} {what:30} {n:5}" for (kind, what), n in sorted(counts.items())]
    return "\n".join(lines) + "\n"


def cases(mode: str) -> Iterator[Damage]:
    """Each kind on each object three times; of data files many more single bits, as these alone
    leave all else that is compared (lengths, ids, pages) as it was."""
    times = sample_or_all(3, 30)
    yield from damages(mode, KINDS, range(times))
    flipped = damages(mode, ["bits flipped"], range(times, 8 * times))
    yield from (damage for damage in flipped if damage.key.endswith(".parquet"))


@pytest.mark.parametrize("mode", ["R3", "R2"])
def test_no_damage_is_taken_for_the_truth(mode, capsys):
    """Over a thousand cases: verify names each damaged object; whoever reads gets the true rows or
    an error of ours, and nothing else ever comes out."""
    counts: Counter[tuple[str, str]] = Counter()
    for damage in cases(mode):
        counts[damage.kind, outcome(mode, damage)] += 1
    with capsys.disabled():
        sys.stdout.write(table(mode, counts))
    assert counts.total() >= 1_350
    assert {kind for kind, _ in counts} == set(KINDS)
