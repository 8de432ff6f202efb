"""Nested groups of settings, accessed by dotted key."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import InputError

ABSENT = object()


def put(settings: dict[str, Any], parts: list[str], value: Any) -> None:
    """Set the value at a dotted path; merge a mapping into an existing one.

    Args:
        settings: The groups of settings, changed in place.
        parts: The dotted path, split at its dots.
        value: The new value, or a mapping of settings.

    Raises:
        InputError: A part of the path before the last one refers to a value, not a group.
    """
    target = settings
    for depth, part in enumerate(parts[:-1]):
        below = target.get(part)
        if below is None:
            below = target[part] = {}
        if not isinstance(below, dict):
            raise InputError(
                [
                    f"{'.'.join(parts)}: {'.'.join(parts[: depth + 1])} is {below!r}, not a group; "
                    "remove one of the two settings"
                ]
            )
        target = below
    _merge(target, {parts[-1]: value})


def _merge(target: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        there = target.get(key)
        if isinstance(there, dict) and isinstance(value, dict):
            _merge(there, value)
        else:
            target[key] = value


def leaves(group: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each dotted key with its value; an empty mapping counts as a value."""
    for name, value in group.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def get(settings: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or ABSENT if the key is missing; null is a value."""
    target: Any = settings
    for part in key.split("."):
        if not isinstance(target, Mapping) or part not in target:
            return ABSENT
        target = target[part]
    return target


def take(settings: dict[str, Any], key: str) -> Any:
    """Remove a dotted key and all groups that become empty; return the key's value or None."""
    first, _, rest = key.partition(".")
    if not rest:
        return settings.pop(first, None)
    below = settings.get(first)
    if not isinstance(below, dict):
        return None
    value = take(below, rest)
    if not below:
        del settings[first]
    return value


def is_interpolated(value: Any) -> bool:
    """Return whether Hydra would compute the value from other values: a text with `${...}`."""
    return isinstance(value, str) and "${" in value
