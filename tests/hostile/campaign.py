"""All cases, a sample of them, and the table of what came of them."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256

from tests.hostile.case import Case
from tests.hostile.families import (
    bombs,
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

FAMILIES: dict[Callable[[str], Iterator[Case]], Sequence[str]] = {
    json_values.cases: ("r3", "r2", "set", "r2set", "r2-1.0"),
    json_texts.cases: ("r2", "r3-1.0"),
    columns.cases: ("r3", "r2", "set", "r2set", "wide", "r3-1.0", "r2-1.0"),
    rows.cases: ("r3", "r2", "set", "r2set", "r2-1.0"),
    layers.cases: ("r3", "r2", "set", "r2set", "wide", "r3-1.0", "r2-1.0"),
    moved.cases: ("r3", "r2", "set", "r2set", "r3-1.0", "r2-1.0", "audited-1.0", "replayed-1.0"),
    damaged.cases: ("r3", "r2"),
    places.cases: ("r3", "r2", "set"),
    bombs.cases: ("r3", "r2"),
}
"""The worlds on which each family is tried."""

SAMPLE = 1_200
"""Cases of a sample, some of which turn out to change nothing."""


@cache
def all_cases() -> list[Case]:
    """Every case, always in this order."""
    found = [case for cases, worlds in FAMILIES.items() for name in worlds for case in cases(name)]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), [n for n in names if names.count(n) > 1][:3]
    return found


def sampled(count: int) -> list[int]:
    """Numbers of cases: every way in which something is done, where a case of a way may change
    nothing twice; every object to which; then of each family the share of its root."""
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


_COSTLY = {"bombs"}
"""Families of which each way is tried once in a sample, on whichever object."""


def way_of(case: Case) -> str:
    """What is done, at which level: 'json/null/L1', 'damaged/cut/L0'."""
    what = case.name.rsplit("/", 2)[1]
    return (
        f"{case.family}/{what.rstrip(' 0123') if case.family == 'damaged' else what}/{case.level}"
    )


def target_of(case: Case) -> str:
    """The world and object to which it is done, without the numbers in its name."""
    world, _, rest = case.name.split("/", 1)[1].partition(":")
    key = rest.rsplit("/", 2)[0].partition(":")[0]
    return f"{case.family}/{world}:{_NUMBER.sub('0', key)}/{case.level}"


_NUMBER = re.compile("[0-9]+")


def _covering(numbers: Sequence[int], of: Callable[[Case], str], times: int) -> Iterator[int]:
    """The first cases of each of something."""
    seen: Counter[str] = Counter()
    for number in numbers:
        name = of(all_cases()[number])
        seen[name] += 1
        if seen[name] <= times:
            yield number


def _spread(numbers: Sequence[int]) -> list[int]:
    """In an order in which what is done, then to what, comes round again as late as possible."""
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
    """What a run of the campaign found."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)

    @property
    def failed(self) -> dict[str, list[str]]:
        """By case what is not as it must be, and not known."""
        return {
            name: verdict.bad
            for name, verdict in self.verdicts.items()
            if verdict.bad and open_pattern(name) is None
        }

    @property
    def mended(self) -> list[str]:
        """Patterns of OPEN under which cases were tried, all of which came out right."""
        bad: dict[str, bool] = {}
        for name, verdict in self.verdicts.items():
            pattern = open_pattern(name)
            if pattern is not None:
                bad[pattern] = bad.get(pattern, False) or bool(verdict.bad)
        return [pattern for pattern in OPEN if bad.get(pattern) is False]

    def table(self) -> str:
        """By family and level: cases, accepted wrongly, unnamed, tracebacks, hangs, the worst
        memory (MB) and time (s), and all CPU time."""
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
    """Try cases by number; `whole`: with every reader and command, not only some of them each."""
    outcome = Outcome()
    for number, verdict in tried(numbers, whole, processes, limit_s):
        assert isinstance(verdict, Verdict)
        if not verdict.impossible:
            outcome.verdicts[all_cases()[number].name] = verdict
            seen(all_cases()[number].name, verdict)
    return outcome
