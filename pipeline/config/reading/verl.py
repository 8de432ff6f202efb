"""The treatment of verl's settings that Retrace does not have.

Users can therefore keep the settings files that they wrote for verl. A setting is refused, with the
reason, if the run would not compute what the setting asks for. A setting without a counterpart is
not taken over, which a note reports.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from pipeline.config.reading.verl_keys import NOT_TAKEN_OVER, REFUSED
from pipeline.config.reading.verl_mapped import MAPPED
from pipeline.config.tree import RunConfig

UNUSED = "not taken over; Retrace has no such setting"
"""The note on settings without a counterpart."""


@dataclass(frozen=True)
class Foreign:
    """One pattern of verl settings that Retrace does not have."""

    pattern: str
    """Dotted key; `*` matches any characters."""
    reason: str = ""
    """Why other values are refused; empty if any value is ignored."""
    harmless: tuple[Any, ...] = ()
    """The values that match what Retrace always does."""
    agrees: Callable[[RunConfig, str, Any], bool] | None = None
    """Returns whether a value agrees with the setting that determines it here."""
    fix: str = ""
    """The fix for a value that does not agree."""

    @property
    def ignored(self) -> bool:
        """Whether the setting is ignored regardless of its value."""
        return not self.reason

    @property
    def note(self) -> str:
        """The note on an accepted value."""
        return UNUSED if self.ignored else f"ignored; {self.reason}"

    def accepts(self, value: Any) -> bool:
        """Return whether a value may be ignored, as far as this entry alone can decide.

        `accepts_with` compares the value with other settings. Null and an empty group are always
        accepted, because they have no effect in verl either.
        """
        if value is None or value == {} or self.ignored or self.agrees is not None:
            return True
        # In Python True == 1, but in a settings file they differ.
        return any(
            value == h and isinstance(value, bool) == isinstance(h, bool) for h in self.harmless
        )

    def accepts_with(self, config: RunConfig, key: str, value: Any) -> bool:
        """Return whether the value agrees with the other settings, if it must.

        Args:
            config: All settings of the run.
            key: The dotted key of verl's setting.
            value: The setting's value; null and an empty group always agree.
        """
        return self.agrees is None or value in (None, {}) or self.agrees(config, key, value)

    @property
    def refusal(self) -> str:
        """The reason for a refusal, and the fix."""
        if self.agrees is not None:
            return f"{self.reason}; {self.fix}"
        if self.harmless:
            return f"{self.reason}; write {self.values} or leave the key out"
        return f"{self.reason}; leave the key out"

    @property
    def values(self) -> str:
        """The harmless values, as text."""
        return " or ".join(map(str, self.harmless))


@cache
def foreign_settings() -> tuple[Foreign, ...]:
    """Return all entries; the first one that matches a key applies."""
    return tuple(_entries())


def _entries() -> Iterator[Foreign]:
    for row in MAPPED:
        for name in row.names.split():
            yield Foreign(name, row.reason, agrees=row.accepts, fix=row.fix)
    for group, rows in REFUSED.items():
        for names, reason, *harmless in rows:
            for name in names.split():
                yield Foreign(f"{group}.{name}".lstrip("."), reason, tuple(harmless))
    for group, names in NOT_TAKEN_OVER.items():
        for name in names.split():
            yield Foreign(f"{group}.{name}".lstrip("."))


def find_foreign(key: str) -> Foreign | None:
    """Return the entry for one of verl's keys, or None if the key is unknown."""
    return next((entry for entry in foreign_settings() if _matches(key, entry.pattern)), None)


def _matches(key: str, pattern: str) -> bool:
    # "critic.*" also matches an empty or null "critic".
    return fnmatchcase(key, pattern) or pattern == f"{key}.*"
