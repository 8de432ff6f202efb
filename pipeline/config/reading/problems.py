"""Pydantic's errors as sentences: the key, the value found, the values expected and the fix."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from pipeline.config.keys import Key, all_keys
from pipeline.config.reading.hints import EMPTY_HINTS, HINTS, NEAREST, REFUSED_VALUES
from pipeline.errors import shown

_TYPES = {
    bool: "true/false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a group",
}


def problems_of(error: ValidationError, written: dict[str, str], skip: set[str]) -> list[str]:
    """Return one sentence per invalid key, except for the keys in `skip`.

    Args:
        error: Pydantic's errors for the settings.
        written: The user's spelling of each setting whose spelling differs from ours, by our key.
        skip: Dotted keys to leave out.
    """
    found: dict[str, str] = {}
    for details in error.errors():
        for key, text in _sentences(details):
            origin = f" (written as {written[key]})" if key in written else ""
            found.setdefault(key, f"{key}{origin}: {text}")
    return [text for key, text in found.items() if key not in skip]


def wrong_key(details: ErrorDetails) -> str:
    """Return the dotted key of the setting to which an error from the settings tree refers."""
    if details["type"] in ("extra_forbidden", "invalid_key", "missing"):
        return ".".join(str(part) for part in details["loc"])
    return _locate(details["loc"])[0].name


def nearest_key(unknown: str) -> str | None:
    """Return the known key that the user most likely meant: one with the same or a similar name."""
    group, _, name = unknown.rpartition(".")
    known = list(all_keys())
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == group}
    others = [
        key
        for key in sorted(known, key=lambda key: _is_secondary(key, unknown))
        if not unknown.startswith(f"{key}.") and key.rpartition(".")[2] != "enable"
    ]
    same_name = [key for key in others if key.rpartition(".")[2] == name]
    is_below = any(key.startswith(f"{group}.") for key in same_name)
    if group and not is_below and (longer := _with_words(name, siblings)) is not None:
        return siblings[longer]
    if same_name:
        likely = [key for key in same_name if not _is_secondary(key, unknown)]
        return difflib.get_close_matches(unknown, likely or same_name, 1, 0.0)[0]
    elsewhere = {key.rpartition(".")[2]: key for key in reversed(others)}
    for candidates, cutoff in ((siblings, 0.6), (elsewhere, 0.75)):
        close = difflib.get_close_matches(name, candidates, 1, cutoff)
        if close:
            return candidates[close[0]]
    return None


def _with_words(name: str, others: Iterable[str]) -> str | None:
    """Return the first of the other names that contains all words of a name: `max_len` has two."""
    words = set(name.split("_"))
    return next((other for other in others if words <= set(other.split("_"))), None)


def _is_secondary(key: str, unknown: str) -> bool:
    """Return whether a key repeats an actor or rollout key, and `unknown` is in another group."""
    groups = ("critic.", "launch.", "actor_rollout_ref.ref.")
    return any(key.startswith(group) and not unknown.startswith(group) for group in groups)


def _sentences(details: ErrorDetails) -> list[tuple[str, str]]:
    """Return pairs of a dotted key and a text.

    A missing group results in one pair for each of its required settings.
    """
    if details["type"] in ("extra_forbidden", "invalid_key"):
        unknown = ".".join(str(part) for part in details["loc"])
        return [(unknown, _unknown(unknown))]
    key, place = _locate(details["loc"])
    if details["type"] == "missing":
        return [
            (name, f"missing, expected {all_keys()[name].expected}; {_how_to_add(name)}")
            for name in _required_below(key)
        ]
    finite = ", not infinity or NaN" if details["type"] == "finite_number" else ""
    expected = key.expected_item if place else key.expected
    if details["type"] == "value_error" and key.is_place:
        return [(key.name, f"{details['ctx']['error']}; {_fix(key, details['input'])}")]
    text = f"found {_found(details['input'])}, expected {expected}{finite}"
    fix = _fix(key, details["input"])
    return [(key.name, f"{place}{text}; {fix}")]


def _how_to_add(name: str) -> str:
    """Return the fix for a missing setting, ready to copy; in a file, the groups are nested."""
    *groups, last = name.split(".")
    nested = f"{last}: ..."
    for group in reversed(groups):
        nested = f"{group}: {{{nested}}}"
    return f"add `{nested}` to the file, or {name}=... to the command"


def _unknown(unknown: str) -> str:
    if unknown in all_keys():
        return (
            "found a key with dots, expected nested groups; nest the key, or set it on the command "
            "line"
        )
    nearest = nearest_key(unknown)
    if nearest is None:
        group = unknown.rpartition(".")[0]
        names = [key.rpartition(".")[2] for key in all_keys() if key.rpartition(".")[0] == group]
        return f"unknown key; {group or 'the top level'} contains {', '.join(names)}"
    return f"unknown key; did you mean {nearest}?"


def _locate(loc: tuple[int | str, ...]) -> tuple[Key, str]:
    """Return the key at a pydantic location, and the place inside its value ('item 1: ')."""
    name, place = "", ""
    for part in loc:
        longer = f"{name}.{part}" if name else str(part)
        if longer in all_keys():
            name = longer
        elif isinstance(part, int):
            place = f"item {part}: "
        # Other parts name the branch of a union; they are not part of the user's text.
    return all_keys()[name], place


def _required_below(key: Key) -> list[str]:
    """Return the key's name, or the names of the required settings of a group."""
    if key.section is None:
        return [key.name]
    return [
        name
        for name, below in all_keys().items()
        if name.startswith(f"{key.name}.") and below.section is None and below.field.is_required()
    ]


def _found(value: Any) -> str:
    kind = "" if value is None else f" ({_TYPES.get(type(value), type(value).__name__)})"
    return shown(value) + kind


def _fix(key: Key, value: Any) -> str:
    if key.section is not None:
        return _fix_of_group(key, value)
    if value in (None, "") and key.name in EMPTY_HINTS:
        return EMPTY_HINTS[key.name]
    if isinstance(value, str) and (fix := _fix_of_text(key, value)) is not None:
        return fix
    if key.name in HINTS:
        return HINTS[key.name]
    if key.expected.startswith(("text", "a path")) and not isinstance(value, str | None):
        if not isinstance(value, list):
            return f"write a text: {str(value)!r}"
        if "a list" not in key.expected:
            return f"""write one text: {key.name}='{",".join(map(str, value))}'"""
    default = key.field.default
    if default not in (None, PydanticUndefined):
        return f"the default is {default!r}"
    return "correct it or leave it out" if not key.field.is_required() else "correct it"


def _fix_of_group(group: Key, value: Any) -> str:
    """Return the fix for a value where a group belongs: the setting in the group that it fits."""
    below = [key for name, key in all_keys().items() if name.rpartition(".")[0] == group.name]
    for key in below:
        if value in key.choices or (value is True and key.name.endswith(".enable")):
            return f"write {key.name}={value}"
    example = next((key for key in below if key.field.is_required()), below[0])
    return f"write its settings below it, such as {example.name}=..."


def _fix_of_text(key: Key, value: str) -> str | None:
    """Return the fix for a wrong text if it is known, or is almost one of the setting's options."""
    lower = value.lower()
    if lower == "none" and "null" in key.expected:
        return "write null"
    if fix := REFUSED_VALUES.get(key.name, {}).get(lower):
        return fix
    if key.table and value.endswith(".py"):
        return f"add the name of its function: {value}:my_function"
    meant = NEAREST.get(key.name, {}).get(lower)
    if meant is None:
        options = {option.lower(): option for option in key.choices}
        likeness = 0.75 if key.name in HINTS else 0.5
        close = difflib.get_close_matches(lower, options, 1, likeness)
        meant = options[close[0]] if close else None
    return None if meant is None else f"did you mean {meant}?"
