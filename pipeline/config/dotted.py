"""Settings as groups within groups, by dotted key."""

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import InputError

ABSENT = object()


def put(settings: dict[str, Any], parts: list[str], value: Any) -> None:
    """Set the value at a dotted path; a mapping is merged into an existing one.

    Raises InputError where the path leads through a value.
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
                    "remove one of the two"
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
    """Yield dotted keys and values; an empty mapping is a value."""
    for name, value in group.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def get(settings: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; ABSENT if it is missing, because null is a value."""
    target: Any = settings
    for part in key.split("."):
        if not isinstance(target, Mapping) or part not in target:
            return ABSENT
        target = target[part]
    return target


def take(settings: dict[str, Any], key: str) -> Any:
    """Remove a dotted key, and groups above it that become empty; return its value or None."""
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
    """Whether Hydra would compute the value from others: text with `${...}`."""
    return isinstance(value, str) and "${" in value
