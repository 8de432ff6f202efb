"""Rows of the metrics table."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

Metrics = dict[str, float | None]
"""A step's values by name; None for a metric that was not measured."""

T = TypeVar("T")

_LAYER = "/layer_"

_CHOICE = re.compile(r"\{([^}]*)\}")
_OPEN = re.compile(r"<[^>]*>")


@dataclass(frozen=True)
class Metric:
    """A metric, or several of one kind. Example: Metric("critic/score/{mean,max}", "", "...")."""

    name: str
    """The name, in which `{a,b}` stands for one of several words and `<word>` for any text."""
    unit: str
    """The unit; empty for a number without a unit."""
    meaning: str
    when: str = ""
    """The condition under which a step has the metric; empty if every step has it."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names for all alternatives of `{a,b}`, with `<word>` unchanged."""
        choice = _CHOICE.search(self.name)
        if choice is None:
            return (self.name,)
        head, tail = self.name[: choice.start()], self.name[choice.end() :]
        return tuple(f"{head}{word}{tail}" for word in choice[1].split(","))

    @property
    def is_open(self) -> bool:
        """Whether the name contains a `<word>`."""
        return _OPEN.search(self.name) is not None

    def covers(self, name: str) -> bool:
        """Return whether this row describes the metric with this name."""
        patterns = (".+".join(map(re.escape, _OPEN.split(own))) for own in self.names)
        return any(re.fullmatch(pattern, name) for pattern in patterns)


@dataclass(frozen=True)
class Group:
    """A titled group of rows: a section of docs/metrics.md."""

    title: str
    metrics: tuple[Metric, ...]


def by_layer(name: str, values: Mapping[int, T]) -> dict[str, T]:
    """Return the values of a metric in each layer of the model, as separate metrics.

    Example: by_layer("replay/agreement", {3: 0.98}) -> {"replay/agreement/layer_3": 0.98}.
    """
    return {f"{name}{_LAYER}{layer}": values[layer] for layer in sorted(values)}


def layers_of(metrics: Mapping[str, float | None], name: str) -> dict[int, float]:
    """Return a metric's values by layer, from the metrics of a step; {} if there are none."""
    start = name + _LAYER
    return {
        int(key.removeprefix(start)): value
        for key, value in metrics.items()
        if key.startswith(start) and value is not None
    }
