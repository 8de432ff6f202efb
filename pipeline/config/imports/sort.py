"""verl's settings by what becomes of them here: kept, without effect, refused, missing."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.keys import all_keys
from pipeline.config.reading.load import load_config
from pipeline.config.reading.spellings import our_spelling
from pipeline.config.reading.verl import find_foreign
from pipeline.errors import InputError

_PROBLEM = re.compile(
    r"(?P<key>[\w.-]+)(?: \(written as (?P<written>[\w.-]+)\))?: (?P<text>.*)", re.DOTALL
)
_VALUE = re.compile(r"^(item \d+: )?found .*?(; |, (?=expected))", re.DOTALL)
"""What a problem says of the value, which stands beside it."""
_ROUNDS = 10
"""Each takes out what was refused; what hid behind it shows in the next."""


@dataclass
class SortedSettings:
    """What becomes of each setting. Keys are ours in `kept` and `missing`, verl's elsewhere."""

    kept: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By reason: the keys without effect here, with their values."""
    refused: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """The value, and the reason with the fix."""
    missing: dict[str, str] = field(default_factory=dict)
    """What must be added, and what is expected."""
    notes: dict[str, str] = field(default_factory=dict)
    """What the reader notes on settings that are kept, such as another value that it takes."""


def sort_settings(settings: Mapping[str, Any]) -> SortedSettings:
    """Sort settings, by dotted key, as the reader of settings treats them.

    A null that is refused says nothing, and counts as without effect.
    """
    result = SortedSettings()
    left = dict(settings)
    for _ in range(_ROUNDS):
        before = len(left)
        result.missing = {}
        for named, text in _problems(left).items():
            found = [key for key in left if _is_below(key, named)]
            for key in found:
                _take_out(result, key, left.pop(key), text)
            if not found and named not in result.refused:
                result.missing[named] = text
        if len(left) == before:
            break
    for key, value in left.items():
        ours = our_spelling(key)
        foreign = find_foreign(ours)
        if foreign is None and _is_ours(ours):
            result.kept[ours] = value
        else:
            reason = foreign.reason if foreign is not None else "accepted, and without effect"
            result.ignored.setdefault(reason, {})[key] = value
    result.notes = _comments(result)
    return result


def _comments(result: SortedSettings) -> dict[str, str]:
    """The reader's notes, by key, on what is kept; anything stands for what is missing."""
    try:
        loaded = load_config({}, [*result.kept.items(), *((key, "x") for key in result.missing)])
    except InputError:  # a missing setting that takes no such text
        return {}
    found = [_PROBLEM.fullmatch(note) for note in loaded.notes]
    return {note["key"]: note["text"] for note in found if note and note["key"] in result.kept}


def _take_out(result: SortedSettings, key: str, value: Any, text: str) -> None:
    if value is None:
        result.ignored.setdefault("null, and so not set", {})[key] = value
    else:
        result.refused[key] = (value, _VALUE.sub("", text))


def _problems(settings: Mapping[str, Any]) -> dict[str, str]:
    """What the reader says, by the key as the user wrote it."""
    try:
        load_config({}, list(settings.items()))
    except InputError as error:
        found = [_PROBLEM.fullmatch(problem) for problem in error.problems]
        return {
            problem["written"] or problem["key"]: problem["text"]
            for problem in found
            if problem is not None
        }
    return {}


def _is_below(key: str, group: str) -> bool:
    return f"{key}.".startswith(f"{group}.")


def _is_ours(key: str) -> bool:
    """Whether it is a setting, or lies within one whose value is a mapping."""
    parts = key.split(".")
    prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(name in all_keys() and all_keys()[name].section is None for name in prefixes)
