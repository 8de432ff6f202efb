"""Functions that build entries for the table of verl's settings, one function per concern."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pipeline.config.reading.foreign import Agreement, Concern, Foreign

Entries = list[Foreign]


def speed(names: str, reason: str) -> Entries:
    """Return entries for settings that affect only speed, memory use or placement."""
    return [Foreign(name, Concern.SPEED, reason) for name in names.split()]


def records(names: str, reason: str) -> Entries:
    """Return entries for settings that determine what is logged or saved, and under which name."""
    return [Foreign(name, Concern.RECORDS, reason) for name in names.split()]


def seeds(names: str, reason: str) -> Entries:
    """Return entries for seeds and for settings that determine the order of samples."""
    return [Foreign(name, Concern.RANDOM, reason) for name in names.split()]


def unread(names: str, reason: str, guard: str) -> Entries:
    """Return entries for settings that verl reads only if another key has a value refused here.

    Args:
        names: Patterns of dotted keys, separated by spaces.
        reason: The reason that the note gives, worded as the end of a sentence.
        guard: The other key.
    """
    return [Foreign(name, Concern.UNREAD, reason, guard=guard) for name in names.split()]


def same(names: str, reason: str, *harmless: Any) -> Entries:
    """Return entries for settings whose `harmless` values match Retrace's fixed behaviour."""
    return [Foreign(name, Concern.SAME, reason, harmless) for name in names.split()]


def off(names: str, reason: str) -> Entries:
    """Return entries for switches of features that Retrace lacks; only False is accepted."""
    return same(names, reason, False)


def elsewhere(names: str, reason: str, agreement: Agreement) -> Entries:
    """Return entries for settings that must agree with other settings.

    Args:
        names: Patterns of dotted keys, separated by spaces.
        reason: The reason that the note or refusal gives, worded as the end of a sentence.
        agreement: The condition that the value must meet, and the fix.
    """
    return [Foreign(name, Concern.ELSEWHERE, reason, agreement=agreement) for name in names.split()]


def refused(names: str, reason: str) -> Entries:
    """Return entries for settings that accept no value except null."""
    return [Foreign(name, Concern.REFUSED, reason) for name in names.split()]


def with_prefix(prefix: str, *entries: Iterable[Foreign]) -> Entries:
    """Return the entries of all groups, with `prefix` and a dot before each pattern."""
    return [replace(one, pattern=f"{prefix}.{one.pattern}") for group in entries for one in group]
