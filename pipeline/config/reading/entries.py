"""The words in which the table of verl's settings is written: one function per concern."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pipeline.config.reading.foreign import Agreement, Concern, Foreign

Entries = list[Foreign]


def speed(names: str, reason: str) -> Entries:
    """Settings of speed, memory or place."""
    return [Foreign(name, Concern.SPEED, reason) for name in names.split()]


def records(names: str, reason: str) -> Entries:
    """Settings of what is logged, saved or named."""
    return [Foreign(name, Concern.RECORDS, reason) for name in names.split()]


def seeds(names: str, reason: str) -> Entries:
    """Seeds and orders."""
    return [Foreign(name, Concern.RANDOM, reason) for name in names.split()]


def unread(names: str, reason: str, guard: str) -> Entries:
    """Settings that verl reads only with another value of the key `guard`."""
    return [Foreign(name, Concern.UNREAD, reason, guard=guard) for name in names.split()]


def same(names: str, reason: str, *harmless: Any) -> Entries:
    """Settings of which these values do what happens here."""
    return [Foreign(name, Concern.SAME, reason, harmless) for name in names.split()]


def off(names: str, reason: str) -> Entries:
    """Switches that are off here."""
    return same(names, reason, False)


def elsewhere(names: str, reason: str, agreement: Agreement) -> Entries:
    """Settings that must agree with others."""
    return [Foreign(name, Concern.ELSEWHERE, reason, agreement=agreement) for name in names.split()]


def refused(names: str, reason: str) -> Entries:
    """Settings of which no value is accepted but null."""
    return [Foreign(name, Concern.REFUSED, reason) for name in names.split()]


def with_prefix(prefix: str, *entries: Iterable[Foreign]) -> Entries:
    """The entries with a prefix before their patterns."""
    return [replace(one, pattern=f"{prefix}.{one.pattern}") for group in entries for one in group]
