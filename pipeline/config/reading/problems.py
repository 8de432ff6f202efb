"""Pydantic's errors as sentences: the key, what was found, what was expected, the fix."""

import difflib
import typing
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from pipeline.config.keys import Key, all_keys, named_in
from pipeline.config.reading.verl import EMPTY_HINTS, HINTS, NEAREST

_TYPES = {
    bool: "true/false",
    int: "an integer",
    float: "a number",
    str: "text",
    list: "a list",
    dict: "a group",
}


def problems_of(error: ValidationError, written: dict[str, str], skip: set[str]) -> list[str]:
    """One sentence per key, except for the keys in `skip`.

    `written` maps our keys to the user's spelling of them.
    """
    found: dict[str, str] = {}
    for details in error.errors():
        for key, text in _sentences(details):
            origin = f" (written as {written[key]})" if key in written else ""
            found.setdefault(key, f"{key}{origin}: {text}")
    return [text for key, text in found.items() if key not in skip]


def wrong_key(details: ErrorDetails) -> str:
    """The dotted key that an error of the settings tree is about, as it is in the settings."""
    if details["type"] in ("extra_forbidden", "invalid_key", "missing"):
        return ".".join(str(part) for part in details["loc"])
    return _locate(details["loc"])[0].name


def nearest_key(unknown: str) -> str | None:
    """The known key that the user most likely meant: the same name elsewhere, or a similar one."""
    group, _, name = unknown.rpartition(".")
    known = list(all_keys())
    same_name = [
        key for key in known if key.rpartition(".")[2] == name and not unknown.startswith(f"{key}.")
    ]
    if same_name:
        return difflib.get_close_matches(unknown, same_name, 1, 0.0)[0]
    siblings = {key.rpartition(".")[2]: key for key in known if key.rpartition(".")[0] == group}
    elsewhere = {key.rpartition(".")[2]: key for key in known if not unknown.startswith(f"{key}.")}
    for candidates, cutoff in ((siblings, 0.6), (elsewhere, 0.75)):
        close = difflib.get_close_matches(name, candidates, 1, cutoff)
        if close:
            return candidates[close[0]]
    return None


def _sentences(details: ErrorDetails) -> list[tuple[str, str]]:
    """Dotted keys and texts; several when a whole group with required settings is missing."""
    if details["type"] in ("extra_forbidden", "invalid_key"):
        unknown = ".".join(str(part) for part in details["loc"])
        return [(unknown, _unknown(unknown))]
    key, place = _locate(details["loc"])
    if details["type"] == "missing":
        return [
            (name, f"missing, expected {all_keys()[name].expected}; {_how_to_add(name)}")
            for name in _required_below(key)
        ]
    finite = ", which is finite" if details["type"] == "finite_number" else ""
    text = f"found {_found(details['input'])}, expected {key.expected}{finite}"
    fix = _fix(key, details["input"])
    return [(key.name, f"{place}{text}; {fix}")]


def _how_to_add(name: str) -> str:
    """What may be copied: in a file the groups are nested."""
    *groups, last = name.split(".")
    nested = f"{last}: ..."
    for group in reversed(groups):
        nested = f"{group}: {{{nested}}}"
    return f"add `{nested}` to the file, or {name}=... to the command"


def _unknown(unknown: str) -> str:
    if unknown in all_keys():
        return "a key with dots in a YAML file; nest it, or give it on the command line"
    nearest = nearest_key(unknown)
    if nearest is None:
        group = unknown.rpartition(".")[0]
        names = [key.rpartition(".")[2] for key in all_keys() if key.rpartition(".")[0] == group]
        return f"unknown key; {group or 'at the top'} has {', '.join(names)}"
    return f"unknown key; did you mean {nearest}?"


def _locate(loc: tuple[int | str, ...]) -> tuple[Key, str]:
    """The key of a pydantic location, and the place inside its value ('item 1: ')."""
    name, place = "", ""
    for part in loc:
        longer = f"{name}.{part}" if name else str(part)
        if longer in all_keys():
            name = longer
        elif isinstance(part, int):
            place = f"item {part}: "
        # Other parts name the branch of a union, which the user did not write.
    return all_keys()[name], place


def _required_below(key: Key) -> list[str]:
    """The key itself, or the required settings of a group."""
    if key.section is None:
        return [key.name]
    return [
        name
        for name, below in all_keys().items()
        if name.startswith(f"{key.name}.") and below.section is None and below.field.is_required()
    ]


def _found(value: Any) -> str:
    if value is None:
        return "null"
    return f"{value!r} ({_TYPES.get(type(value), type(value).__name__)})"


def _fix(key: Key, value: Any) -> str:
    if key.section is not None:
        return "write its settings below it"
    if value in (None, "") and key.name in EMPTY_HINTS:
        return EMPTY_HINTS[key.name]
    if key.name in HINTS:
        return HINTS[key.name]
    if isinstance(value, str):
        if value.lower() == "none" and "null" in key.expected:
            return "write null"
        if meant := NEAREST.get(key.name, {}).get(value.lower()):
            return f"did you mean {meant}?"
        table = named_in(key.field)
        allowed = list(table.table) if table else _literals(key.field.annotation)
        close = difflib.get_close_matches(value.lower(), [a.lower() for a in allowed], 1, 0.5)
        if close:
            meant = next(a for a in allowed if a.lower() == close[0])
            return f"did you mean {meant}?"
    elif isinstance(value, list) and key.expected.startswith("text"):
        return f"""write one text: {key.name}='{",".join(map(str, value))}'"""
    elif value is not None and key.expected.startswith("text"):
        return f"""put it in quotes: {key.name}='"{value}"'"""
    default = key.field.default
    if default not in (None, PydanticUndefined):
        return f"the default is {default!r}"
    return "correct it or leave it out" if not key.field.is_required() else "correct it"


def _literals(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [text for part in typing.get_args(annotation) for text in _literals(part)]
