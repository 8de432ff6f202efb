"""Hundreds of damaged runs: `verify` names each damaged object, and no reader accepts one."""

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice

import pytest

from tests.damage import KINDS, Damage, damages
from tests.damage_judge import outcome
from tests.exhaustive import sample_or_all

pytestmark = pytest.mark.integration


def table(mode: str, counts: Counter[tuple[str, str]]) -> str:
    lines = [f"\n{mode}: {counts.total()} cases of damage, 0 accepted wrongly"]
    lines += [f"  {kind:28} {what:30} {n:5}" for (kind, what), n in sorted(counts.items())]
    return "\n".join(lines) + "\n"


def cases(mode: str) -> Iterator[Damage]:
    """Yield each kind of damage to each object; in data files, flip bits more often.

    Flipped bits have more cases, because only they leave everything else that readers compare
    (lengths, ids, pages) unchanged.
    """
    times = sample_or_all(1, 30)
    once = damages(mode, KINDS, range(times))
    flipped = damages(mode, ["bits flipped"], range(times, 8 * times))
    of_files = (damage for damage in flipped if damage.key.endswith(".parquet"))
    yield from islice(chain(once, of_files), 0, None, sample_or_all(3, 1))


@pytest.mark.parametrize("mode", ["R3", "R2"])
def test_no_damage_is_accepted(mode, capsys):
    """`verify` names each damaged object; readers return the true rows or raise a known error."""
    counts: Counter[tuple[str, str]] = Counter()
    for damage in cases(mode):
        counts[damage.kind, outcome(mode, damage)] += 1
    with capsys.disabled():
        sys.stdout.write(table(mode, counts))
    assert counts.total() >= sample_or_all(150, 500)
    assert {kind for kind, _ in counts} == set(KINDS)
