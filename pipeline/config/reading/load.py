"""Loading settings: a YAML file, overrides on top, validated at once, all problems shown together.

file ─► merge overrides ─► one spelling per setting ─► verl's keys sorted out ─► typed tree
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.reading.problems import problems_of
from pipeline.config.reading.read import read_file, read_mapping, read_override, read_pair
from pipeline.config.reading.verl import ALIASES, find_foreign
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError

_ABSENT = object()


@dataclass(frozen=True)
class LoadedConfig:
    """Settings, with notes for the user."""

    config: RunConfig
    notes: tuple[str, ...]
    """One line per group of keys that were accepted but have no effect."""


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str | tuple[str, Any]] = (),
    defaults: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Read CONFIG.yaml, or take a mapping as its content, apply overrides in order, and validate.

    An override is the text `key.path=value`, or a dotted key with its value. `defaults`, by dotted
    key, apply where neither the file nor an override sets a value.

    Relative paths among the settings are relative to the working directory, not to the file.
    Rules across settings are not checked here: see pipeline.config.rules.check.
    Raises InputError with all problems.
    """
    problems: list[str] = []
    settings = read_mapping(source) if isinstance(source, Mapping) else read_file(Path(source))
    for key, value in (defaults or {}).items():
        if _get(settings, key) is _ABSENT:
            _apply(settings, key.split("."), value)
    for override in overrides:
        try:
            _apply(settings, *_read(override))
        except InputError as error:
            problems += error.problems
    return _load(settings, problems)


def _read(override: str | tuple[str, Any]) -> tuple[list[str], Any]:
    return read_override(override) if isinstance(override, str) else read_pair(*override)


def _load(settings: dict[str, Any], problems: list[str]) -> LoadedConfig:
    written = _one_spelling(settings, problems)
    notes = _take_out_foreign(settings, problems)
    interpolated = {
        key: value for key, value in _leaves(settings) if isinstance(value, str) and "${" in value
    }
    problems += [
        f"{key}: found {value!r}; interpolation is not supported; write the value itself, or "
        "let `retrace import-verl` resolve the file"
        for key, value in interpolated.items()
    ]
    _drop_empty_reward(settings)
    try:
        config = RunConfig.model_validate(settings)
    except ValidationError as error:
        problems += problems_of(error, written, skip=set(interpolated))
        raise InputError(problems) from error
    if problems:
        raise InputError(problems)
    return LoadedConfig(config, tuple(notes))


def _apply(settings: dict[str, Any], parts: list[str], value: Any) -> None:
    """Set the value at a dotted path; a mapping is merged into an existing one."""
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


def _one_spelling(settings: dict[str, Any], problems: list[str]) -> dict[str, str]:
    """Move settings from verl's other spellings to ours; return the user's spelling by our key."""
    written: dict[str, str] = {}
    for other, ours in ALIASES.items():
        group = _pop(settings, other)
        if group is None:
            continue
        if not isinstance(group, dict):
            problems.append(f"{other}: found {group!r}, expected a group of settings")
            continue
        for name, value in group.items():
            existing = _get(settings, f"{ours}.{name}")
            if existing is _ABSENT or existing == value:
                written[f"{ours}.{name}"] = f"{other}.{name}"
                try:
                    _apply(settings, [*ours.split("."), str(name)], value)
                except InputError as error:
                    problems += error.problems
            else:
                problems.append(
                    f"{other}.{name}: found {value!r}, but {ours}.{name}, another spelling of the "
                    f"same setting, is {existing!r}; keep {ours}.{name} and remove the other"
                )
    return written


def _take_out_foreign(settings: dict[str, Any], problems: list[str]) -> list[str]:
    """Remove verl's keys that are not ours; return notes on harmless ones, add other problems."""
    ignored: dict[str, list[str]] = {}
    for key, value in list(_leaves(settings)):
        foreign = find_foreign(key)
        if foreign is None:
            continue
        _pop(settings, key)
        if foreign.accepts(value):
            ignored.setdefault(foreign.reason, []).append(key)
        else:
            problems.append(f"{key}: found {value!r}; {foreign.refusal}")
    return [f"{_shorten(names)}: ignored; {reason}" for reason, names in ignored.items()]


def _drop_empty_reward(settings: dict[str, Any]) -> None:
    """Drop verl's form of no reward function: `custom_reward_function: {path: null, ...}`."""
    group = settings.get("custom_reward_function")
    if isinstance(group, dict) and "path" in group and group["path"] is None:
        del settings["custom_reward_function"]


def _shorten(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"


def _leaves(group: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values; an empty mapping is a value."""
    for name, value in group.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _get(settings: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; _ABSENT if it is missing, because null is a value."""
    target: Any = settings
    for part in key.split("."):
        if not isinstance(target, dict) or part not in target:
            return _ABSENT
        target = target[part]
    return target


def _pop(settings: dict[str, Any], key: str) -> Any:
    """Remove a dotted key, and groups above it that become empty; return its value or None."""
    first, _, rest = key.partition(".")
    if not rest:
        return settings.pop(first, None)
    below = settings.get(first)
    if not isinstance(below, dict):
        return None
    value = _pop(below, rest)
    if not below:
        del settings[first]
    return value
