"""A row of the table of metrics."""

import re
from dataclasses import dataclass

_CHOICE = re.compile(r"\{([^}]*)\}")
_OPEN = re.compile(r"<[^>]*>")


@dataclass(frozen=True)
class Metric:
    """One metric, or several of one kind. Example: Metric("critic/score/{mean,max}", "", "...")."""

    name: str
    """`{a,b}` stands for one of several words, `<word>` for any text."""
    unit: str
    """Empty: a number without a unit."""
    meaning: str
    when: str = ""
    """Which steps have the key; empty: all."""

    @property
    def names(self) -> tuple[str, ...]:
        """Each name, with `<word>` left as it is."""
        choice = _CHOICE.search(self.name)
        if choice is None:
            return (self.name,)
        head, tail = self.name[: choice.start()], self.name[choice.end() :]
        return tuple(f"{head}{word}{tail}" for word in choice[1].split(","))

    @property
    def is_open(self) -> bool:
        """Whether part of the name is any text."""
        return _OPEN.search(self.name) is not None

    def covers(self, name: str) -> bool:
        """Whether a name is one of these."""
        patterns = (".+".join(map(re.escape, _OPEN.split(own))) for own in self.names)
        return any(re.fullmatch(pattern, name) for pattern in patterns)


@dataclass(frozen=True)
class Group:
    """Metrics that are read together."""

    title: str
    metrics: tuple[Metric, ...]
