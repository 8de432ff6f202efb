"""Sort verl's settings by their treatment here: kept, ignored, refused or missing."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.keys import all_keys
from pipeline.config.reading.load import LoadedConfig, load_config
from pipeline.config.reading.spellings import our_spelling
from pipeline.config.reading.verl import UNUSED, find_foreign
from pipeline.config.rules.replay import sampling_problems
from pipeline.errors import InputError

_PROBLEM = re.compile(
    r"(?P<key>[\w.-]+)(?: \(written as (?P<written>[\w.-]+)\))?: (?P<text>.*)", re.DOTALL
)
_VALUE = re.compile(r"^(item \d+: )?found .*?(; |, (?=expected))", re.DOTALL)
"""The part of a problem's text that repeats the value. It is removed, because the file shows the
value."""
_ROUNDS = 10
"""Maximum number of rounds. Each round removes the settings that are refused, so that the next
round finds problems that they had hidden."""


@dataclass
class SortedSettings:
    """The treatment of each setting.

    `kept`, `missing` and `notes` contain our keys; the other mappings contain verl's keys.
    """

    kept: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The keys that have no effect here, with their values, grouped by reason."""
    refused: dict[str, tuple[Any, str]] = field(default_factory=dict)
    """The value, and the reason with the fix."""
    missing: dict[str, str] = field(default_factory=dict)
    """The settings that must be added, with the expected values."""
    notes: dict[str, str] = field(default_factory=dict)
    """Notes from pipeline.config.reading on kept settings, such as the value that is used
    instead."""


def sort_settings(settings: Mapping[str, Any]) -> SortedSettings:
    """Sort settings by their treatment in pipeline.config.reading.

    A null that pipeline.config.reading refuses counts as ignored here, because a null has no effect
    in verl. `settings` is keyed by dotted key.
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
            note = "accepted, but without effect" if foreign is None else foreign.note
            reason = note.removeprefix("ignored; ")
            result.ignored.setdefault(reason, {})[key] = value
    loaded = _loaded(result)
    if loaded is not None:
        for key, text in _by_key(sampling_problems(loaded.config)).items():
            _take_out(result, key, result.kept.pop(key), text)
        notes = _by_key(loaded.notes)
        result.notes = {key: text for key, text in notes.items() if key in result.kept}
    return result


def _loaded(result: SortedSettings) -> LoadedConfig | None:
    """Load the kept settings; missing settings get a placeholder, and None means it is refused."""
    try:
        return load_config({}, [*result.kept.items(), *((key, "x") for key in result.missing)])
    except InputError:
        return None


def _by_key(texts: Iterable[str]) -> dict[str, str]:
    """Return the texts of problems or notes, keyed by setting; other texts are left out."""
    found = [_PROBLEM.fullmatch(text) for text in texts]
    return {match["key"]: match["text"] for match in found if match is not None}


def _take_out(result: SortedSettings, key: str, value: Any, text: str) -> None:
    if _has_no_counterpart(key, text):
        result.ignored.setdefault(UNUSED, {})[key] = value
    elif value is None:
        result.ignored.setdefault("null, which means not set", {})[key] = value
    else:
        result.refused[key] = (value, _VALUE.sub("", text))


def _has_no_counterpart(key: str, text: str) -> bool:
    """Return whether a key is unknown here, and no setting of the same name exists elsewhere."""
    if not text.startswith("unknown key"):
        return False
    suggested = text.partition("did you mean ")[2].rstrip("?")
    return suggested.rpartition(".")[2] != key.rpartition(".")[2]


def _problems(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the problems with the settings, keyed by the user's spelling of each setting."""
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
    """Return whether the key is a setting, or is inside a setting whose value is a mapping."""
    parts = key.split(".")
    prefixes = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(name in all_keys() and all_keys()[name].section is None for name in prefixes)
