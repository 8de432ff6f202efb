"""The treatment of verl settings that Retrace does not have.

Apart from seeds and sample orders, no setting that would change results is ignored. Each entry of
the table (pipeline.config.reading.verl) has a concern, which states why ignoring the setting is
harmless. Tests check these statements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pipeline.config.keys import value_at
from pipeline.config.tree import RunConfig


class Concern(Enum):
    """The kinds of verl settings that have no counterpart here.

    The text of each kind describes which values of a setting are ignored. docs/config.md quotes
    these texts.
    """

    SPEED = "any value; the setting affects speed, memory use or placement, not results"
    RECORDS = "any value; the setting determines what is logged or saved, and under which name"
    RANDOM = "any value; the effect of a seed or sample order depends on verl's random generators"
    UNREAD = "any value; verl reads it only if another setting has a value that Retrace refuses"
    SAME = "values that match Retrace's fixed behaviour"
    ELSEWHERE = "values that another setting already determines"
    REFUSED = "no value"


IGNORED = (Concern.SPEED, Concern.RECORDS, Concern.RANDOM, Concern.UNREAD)
"""Concerns whose settings are ignored regardless of their values."""


@dataclass(frozen=True)
class Agreement:
    """The condition on other settings under which a value may be ignored."""

    accepts: Callable[[RunConfig, str, Any], bool]
    """Returns whether the condition is met; called with the settings, the key and its value."""
    fix: str
    """The fix for a value that does not meet the condition, as the end of an error message."""


@dataclass(frozen=True)
class Foreign:
    """One entry of the table: verl settings that Retrace does not have.

    Example: Foreign('trainer.resume_mode', Concern.SAME, 'the same name resumes', ('auto',)).
    """

    pattern: str
    """Dotted key; `*` matches any characters."""
    concern: Concern
    reason: str
    harmless: tuple[Any, ...] = ()
    """SAME: the values that are accepted with a note."""
    guard: str = ""
    """UNREAD: the key whose refused values would make verl read this setting."""
    agreement: Agreement | None = None
    """ELSEWHERE: the condition under which a value may be ignored."""

    def accepts(self, value: Any) -> bool:
        """Return whether a value may be ignored, as far as this entry alone can decide.

        `accepts_with` compares the value with other settings. Null and an empty group are always
        accepted, because they have no effect in verl either.
        """
        if (
            value is None
            or value == {}
            or self.concern in IGNORED
            or self.concern is Concern.ELSEWHERE
        ):
            return True
        # In Python True == 1, but in a settings file they differ.
        return any(
            value == h and isinstance(value, bool) == isinstance(h, bool) for h in self.harmless
        )

    def accepts_with(self, config: RunConfig, key: str, value: Any) -> bool:
        """Return whether the value meets this entry's condition on other settings, if it has one.

        Args:
            config: All settings of the run.
            key: The dotted key of verl's setting.
            value: The setting's value; null and an empty group always meet the condition.
        """
        if self.agreement is None or value is None or value == {}:
            return True
        return self.agreement.accepts(config, key, value)

    @property
    def outcome(self) -> str:
        """The treatment of the setting, as docs/config.md shows it."""
        if self.concern in IGNORED:
            return "ignored"
        if self.concern is Concern.ELSEWHERE:
            return "ignored if the value agrees; otherwise refused"
        if not self.harmless:
            return "refused"
        return f"ignored if {_values(self.harmless)}; otherwise refused"

    @property
    def refusal(self) -> str:
        """The reason for a refusal, and the fix."""
        if self.agreement is not None:
            return f"{self.reason}; {self.agreement.fix}"
        if self.harmless:
            return f"{self.reason}; write {_values(self.harmless)} or leave the key out"
        return f"{self.reason}; leave the key out"


def same_value(*keys: str) -> Agreement:
    """Return the condition that a value equals the sum of the values of `keys`."""
    named = " + ".join(keys)
    return Agreement(
        lambda config, _, value: bool(value == sum(value_at(config, key) for key in keys)),
        f"change {named}, or leave the key out",
    )


def _values(values: Sequence[Any]) -> str:
    return " or ".join(str(value) for value in values)
