"""What is known of a setting of verl's that is not ours, and when it may be ignored.

Nothing that alters a number is ignored. Each entry of the table (pipeline.config.reading.verl) says
by its concern why ignoring it is harmless, and tests hold it to that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pipeline.config.keys import value_at
from pipeline.config.tree import RunConfig


class Concern(Enum):
    """Why a setting of verl's has no counterpart here; each value is a sentence for readers."""

    SPEED = "how fast, in how much memory or in which place, not what is computed"
    RECORDS = "what is logged, saved or named"
    RANDOM = "seeds and orders, which only verl's own generators repeat"
    UNREAD = "verl reads it only with a value of another setting that is refused here"
    SAME = "only the values that do in verl what happens here"
    ELSEWHERE = "only what another setting says already"
    REFUSED = "no value"


IGNORED = (Concern.SPEED, Concern.RECORDS, Concern.RANDOM, Concern.UNREAD)
"""Settings of these are ignored whatever their value is."""


@dataclass(frozen=True)
class Agreement:
    """What other settings must say for a value to change nothing."""

    accepts: Callable[[RunConfig, str, Any], bool]
    """Called with the settings, the key and its value."""
    fix: str


@dataclass(frozen=True)
class Foreign:
    """Settings of verl that are not ours.

    Example: Foreign('trainer.resume_mode', Concern.SAME, 'the same name resumes', ('auto',)).
    """

    pattern: str
    """Dotted key; `*` matches any characters."""
    concern: Concern
    reason: str
    harmless: tuple[Any, ...] = ()
    """SAME: the values that are accepted with a note."""
    guard: str = ""
    """UNREAD: the key whose refused values would make verl read this one."""
    agreement: Agreement | None = None
    """ELSEWHERE: the condition for a value."""

    def accepts(self, value: Any) -> bool:
        """Whether a value is accepted without effect, as far as the value alone can tell.

        Null and an empty group say nothing, in verl too.
        """
        if (
            value is None
            or value == {}
            or self.concern in IGNORED
            or self.concern is Concern.ELSEWHERE
        ):
            return True
        # True == 1 in Python, but not in a settings file.
        return any(
            value == h and isinstance(value, bool) == isinstance(h, bool) for h in self.harmless
        )

    def accepts_with(self, config: RunConfig, key: str, value: Any) -> bool:
        """Whether the other settings say the same, where that matters."""
        if self.agreement is None or value is None or value == {}:
            return True
        return self.agreement.accepts(config, key, value)

    @property
    def outcome(self) -> str:
        """The treatment of the setting, in the words of docs/config.md."""
        if self.concern in IGNORED:
            return "ignored"
        if self.concern is Concern.ELSEWHERE:
            return "ignored where it agrees, else refused"
        if not self.harmless:
            return "refused"
        return f"{_values(self.harmless)} ignored, else refused"

    @property
    def refusal(self) -> str:
        """Reason and fix of a refusal."""
        if self.agreement is not None:
            return f"{self.reason}; {self.agreement.fix}"
        if self.harmless:
            return f"{self.reason}; write {_values(self.harmless)} or leave the key out"
        return f"{self.reason}; leave the key out"


def same_value(*keys: str) -> Agreement:
    """The value is the sum of what these settings say."""
    named = " + ".join(keys)
    return Agreement(
        lambda config, _, value: bool(value == sum(value_at(config, key) for key in keys)),
        f"change {named}, or leave the key out",
    )


def _values(values: Sequence[Any]) -> str:
    return " or ".join(str(value) for value in values)
