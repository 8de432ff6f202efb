"""The list of all cases, samples of this list, and the table of verdicts."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256

from tests.hostile.case import Case
from tests.hostile.families import (
    bombs,
    chains,
    columns,
    damaged,
    json_texts,
    json_values,
    layers,
    moved,
    places,
    rows,
)
from tests.hostile.judge import Verdict
from tests.hostile.known import OPEN, open_pattern
from tests.hostile.pool import tried
from tests.hostile.worlds import NEWER

FAMILIES: dict[Callable[[str], Iterator[Case]], Sequence[str]] = {
    json_values.cases: ("r3", "r2", "set", "r2set", "policies", "r2-1.0", *NEWER),
    json_texts.cases: ("r2", "r3-1.0"),
    columns.cases: ("r3", "r2", "set", "r2set", "wide", "planes", "r3-1.0", "r2-1.0", *NEWER),
    rows.cases: ("r3", "r2", "set", "r2set", "r2-1.0", *NEWER),
    layers.cases: ("r3", "r2", "set", "r2set", "wide", "planes", "r3-1.0", "r2-1.0", *NEWER),
    moved.cases: (
        *("r3", "r2", "set", "r2set", "r3-1.0", "r2-1.0", "audited-1.0", "replayed-1.0"),
        *NEWER,
    ),
    damaged.cases: ("r3", "r2", "filtered", "cut"),
    chains.cases: ("policies",),
    places.cases: ("r3", "r2", "set"),
    bombs.cases: ("r3", "r2"),
}
"""The worlds to which each family is applied."""

SAMPLE = 1_200
"""The number of cases in a sample. Some of them change nothing and give no verdict."""


@cache
def all_cases() -> list[Case]:
    """Return every case, always in the same order."""
    found = [case for cases, worlds in FAMILIES.items() for name in worlds for case in cases(name)]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1][:3]
    return found


def sampled(count: int) -> list[int]:
    """Return the numbers of about `count` cases, in order.

    The sample covers every object once, and every kind of change twice, because a case may change
    nothing. The remaining cases are divided among the families in proportion to the square
    roots of their sizes.
    """
    by_family: dict[str, list[int]] = defaultdict(list)
    for number, case in enumerate(all_cases()):
        by_family[case.family + case.level].append(number)
    chosen: dict[int, None] = {}
    for family, found in by_family.items():
        by_family[family] = found = _spread(found)
        once = all_cases()[found[0]].family in _COSTLY
        chosen |= dict.fromkeys(_covering(found, way_of, 1 if once else 2))
        chosen |= dict.fromkeys([] if once else _covering(found, target_of, 1))
    weights = {family: len(found) ** 0.5 for family, found in by_family.items()}
    left = count - len(chosen)
    for family, found in by_family.items():
        rest = [number for number in found if number not in chosen]
        if all_cases()[found[0]].family not in _COSTLY:
            share = max(0, round(left * weights[family] / sum(weights.values())))
            chosen |= dict.fromkeys(rest[:share])
    return sorted(chosen)


def one_of_each() -> list[int]:
    """Return the numbers of one case per kind of change, level and world, in order."""
    found: dict[tuple[str, str], int] = {}
    for number in _spread(range(len(all_cases()))):
        case = all_cases()[number]
        found.setdefault((way_of(case), case.world), number)
    return sorted(found.values())


_COSTLY = {"bombs"}
"""Families whose changes are tried only once each in a sample, on any object."""


def way_of(case: Case) -> str:
    """Return the case's kind of change and its level: 'json/null/L1', 'damaged/cut/L0'."""
    what = case.name.rsplit("/", 2)[1]
    return (
        f"{case.family}/{what.rstrip(' 0123') if case.family == 'damaged' else what}/{case.level}"
    )


def target_of(case: Case) -> str:
    """Return the world and object that the case changes, with each number replaced by 0."""
    world, _, rest = case.name.split("/", 1)[1].partition(":")
    key = rest.rsplit("/", 2)[0].partition(":")[0]
    return f"{case.family}/{world}:{_NUMBER.sub('0', key)}/{case.level}"


_NUMBER = re.compile("[0-9]+")


def _covering(numbers: Sequence[int], of: Callable[[Case], str], times: int) -> Iterator[int]:
    """Yield the first `times` cases of each group, where `of` returns a case's group."""
    seen: Counter[str] = Counter()
    for number in numbers:
        name = of(all_cases()[number])
        seen[name] += 1
        if seen[name] <= times:
            yield number


def _spread(numbers: Sequence[int]) -> list[int]:
    """Return the cases in an order that repeats kinds of change and objects as late as possible."""
    cases = all_cases()
    seen: Counter[str] = Counter()
    ranked = []
    for number in sorted(numbers, key=lambda n: sha256(cases[n].name.encode()).digest()):
        of = (way_of(cases[number]), cases[number].name.split(":", 1)[1].rsplit("/", 2)[0])
        ranked.append((sum(seen[name] for name in of), number))
        seen.update(of)
    return [number for _, number in sorted(ranked)]


@dataclass
class Outcome:
    """The verdicts of one run of the campaign, keyed by case name."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def failed(self) -> dict[str, list[str]]:
        """The failures of each failed case that OPEN does not list, keyed by case name."""
        return {
            name: verdict.bad
            for name, verdict in self.verdicts.items()
            if verdict.bad and open_pattern(name) is None
        }

    @property
    def mended(self) -> list[str]:
        """The patterns in OPEN whose cases were tried and all passed."""
        bad: dict[str, bool] = {}
        for name, verdict in self.verdicts.items():
            pattern = open_pattern(name)
            if pattern is not None:
                bad[pattern] = bad.get(pattern, False) or bool(verdict.bad)
        return [pattern for pattern in OPEN if bad.get(pattern) is False]

    def table(self) -> str:
        """Return a table with a row per family and level.

        The first columns count cases: all of them, and those that were refused, were wrongly
        accepted, were not reported by verify, ended in a traceback, or hung. The other columns are
        the peak memory (MB), the longest time (s) and the total CPU time (s).
        """
        counts: dict[str, list[Verdict]] = defaultdict(list)
        for name, verdict in self.verdicts.items():
            counts[f"{name.split('/')[0]} {name[-2:]}"].append(verdict)
        titles = ("cases", "refused", "wrong", "unnamed", "tracebacks", "hangs", "MB", "s", "CPU s")
        lines = [f"{'family':14}" + "".join(f"{title:>11}" for title in titles)]
        rows = [*sorted(counts.items()), ("all", list(self.verdicts.values()))]
        for family, found in rows:
            numbers = (
                len(found),
                sum(v.refused > 0 for v in found),
                sum(bool(v.wrong) for v in found),
                sum(v.unnamed for v in found),
                sum(bool(v.tracebacks) for v in found),
                sum(v.hung for v in found),
                round(max((v.memory_mb for v in found), default=0)),
                round(max((v.wall_s for v in found), default=0), 1),
                round(sum(v.cpu_s for v in found), 1),
            )
            lines.append(f"{family:14}" + "".join(f"{number:>11}" for number in numbers))
        return "\n".join(lines)


def run(
    numbers: Sequence[int],
    whole: bool = False,
    processes: int = 2,
    limit_s: float = 60.0,
    seen: Callable[[str, Verdict], None] = lambda name, verdict: None,
) -> Outcome:
    """Try cases and return their verdicts.

    Args:
        numbers: Numbers of cases in `all_cases`.
        whole: Whether to try each case with every slow reader and command, not only with one.
        processes: The number of child processes.
        limit_s: The limit on CPU time per case, in seconds; five times as much if `whole`.
        seen: Called after each case, with the case's name and verdict.

    Returns:
        The verdicts of all cases that change something.
    """
    outcome = Outcome()
    for number, verdict in tried(numbers, whole, processes, limit_s * (5 if whole else 1)):
        assert isinstance(verdict, Verdict)
        if not verdict.impossible:
            outcome.verdicts[all_cases()[number].name] = verdict
            seen(all_cases()[number].name, verdict)
    return outcome
