"""Load settings: read a YAML file, apply overrides, validate everything and report all problems.

file ─► merge overrides ─► one spelling per setting ─► verl's keys taken out ─► typed tree
                                                                  └─► must agree with ─┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.dotted import ABSENT, get, is_interpolated, leaves, put, take
from pipeline.config.reading.problems import problems_of, wrong_key
from pipeline.config.reading.read import read_file, read_mapping, read_override, read_pair
from pipeline.config.reading.spellings import one_spelling, plain_values
from pipeline.config.reading.undecided import undecided
from pipeline.config.reading.verl import Foreign, find_foreign
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError


@dataclass(frozen=True)
class LoadedConfig:
    """Valid settings, with notes for the user."""

    config: RunConfig
    notes: tuple[str, ...]
    """Notes on values that are not used as written, and one note for each reason why keys are
    ignored or not taken over."""


class SettingsError(InputError):
    """Settings that cannot be used, although the valid ones among them may still be checked.

    `wrong` contains the dotted keys of the invalid settings. `rest` contains all settings, with
    defaults or placeholders in place of the invalid ones. It is None if even the valid settings
    cannot be checked.
    """

    def __init__(
        self, problems: Sequence[str], wrong: frozenset[str], rest: RunConfig | None
    ) -> None:
        super().__init__(problems)
        self.wrong = wrong
        self.rest = rest


def load_config(
    source: str | Path | Mapping[str, Any],
    overrides: Sequence[str | tuple[str, Any]] = (),
    defaults: Mapping[str, Any] | None = None,
) -> LoadedConfig:
    """Read settings from a file or mapping, apply the overrides in order, and validate the result.

    Relative paths in the settings are relative to the working directory, not to the file. This
    function does not check rules that involve several settings; pipeline.config.rules.check does.

    Args:
        source: Path of a YAML file, or a mapping in place of the file's content.
        overrides: Strings of the form `key.path=value`, or pairs of a dotted key and its value.
        defaults: Values, by dotted key, for settings that neither the source nor an override sets.

    Raises:
        InputError: The settings cannot be used; the error lists all problems.
    """
    problems: list[str] = []
    settings = read_mapping(source) if isinstance(source, Mapping) else read_file(source)
    for key, value in (defaults or {}).items():
        if get(settings, key) is ABSENT:
            put(settings, key.split("."), value)
    for override in overrides:
        try:
            put(settings, *_read(override))
        except InputError as error:
            problems += error.problems
    if isinstance(others := settings.get("defaults"), list) and others:
        # The listed files contain the other settings, so this file cannot be checked on its own.
        file = "CONFIG.yaml" if isinstance(source, Mapping) else source
        raise InputError(
            [
                *problems,
                f"defaults: found {others!r}, Hydra's list of other files; combine the files into "
                f"one: retrace import-verl {file} -o my.yaml",
            ]
        )
    if not isinstance(source, Mapping):
        problems += undecided(Path(source), settings)
    return _load(settings, problems)


def _read(override: str | tuple[str, Any]) -> tuple[list[str], Any]:
    return read_override(override) if isinstance(override, str) else read_pair(*override)


def _load(settings: dict[str, Any], problems: list[str]) -> LoadedConfig:
    for key, value in list(leaves(settings)):
        if value == "???":  # Hydra's marker for a required value
            take(settings, key)
    written = one_spelling(settings, problems)
    notes = plain_values(settings)
    foreign = _take_out_foreign(settings)
    interpolated = _take_out_interpolated(settings, foreign, problems)
    _drop_what_is_none(settings)
    try:
        config = RunConfig.model_validate(settings)
    except ValidationError as error:
        problems += problems_of(error, written, skip=interpolated)
        wrong, rest = _without_wrong(settings, error)
        _judge(foreign, rest, problems)
        raise SettingsError(problems, wrong | interpolated, rest) from error
    notes += _judge(foreign, config, problems)
    if problems:
        raise SettingsError(problems, frozenset(interpolated), config)
    return LoadedConfig(config, tuple(notes))


def _take_out_foreign(settings: dict[str, Any]) -> list[tuple[str, Any, Foreign]]:
    """Remove verl's keys that are not in our tree; return each with its value and table entry."""
    found = []
    for key, value in list(leaves(settings)):
        foreign = find_foreign(key)
        if foreign is not None:
            take(settings, key)
            found.append((key, value, foreign))
    return found


def _take_out_interpolated(
    settings: dict[str, Any], foreign: list[tuple[str, Any, Foreign]], problems: list[str]
) -> set[str]:
    """Refuse values that Hydra would compute, unless their keys are ignored anyway.

    Remove the refused values from `settings` and `foreign`. Return the keys of those removed from
    `settings`.
    """
    ours = {key: value for key, value in leaves(settings) if is_interpolated(value)}
    theirs = [one for one in foreign if is_interpolated(one[1]) and not one[2].ignored]
    for one in theirs:
        foreign.remove(one)
    found = ours | {key: value for key, value, _ in theirs}
    for key in ours:
        take(settings, key)
    if found:
        key, value = next(iter(found.items()))
        more = f" and {len(found) - 1} more such values" if len(found) > 1 else ""
        problems.append(
            f"{key}: found {value!r}{more}; interpolation is not supported; write the value "
            "itself, or resolve the file with `retrace import-verl`"
        )
    return set(ours)


def _judge(
    foreign: list[tuple[str, Any, Foreign]], config: RunConfig | None, problems: list[str]
) -> list[str]:
    """Return one note per reason for ignoring verl's keys; add the refused keys to `problems`."""
    ignored: dict[str, list[str]] = {}
    for key, value, entry in foreign:
        if entry.accepts(key, value, config):
            ignored.setdefault(entry.note, []).append(key)
        else:
            problems.append(f"{key}: found {value!r}; {entry.refusal}")
    return [f"{_shorten(names)}: {note}" for note, names in ignored.items()]


def _without_wrong(
    settings: dict[str, Any], error: ValidationError
) -> tuple[frozenset[str], RunConfig | None]:
    """Return the invalid keys, and the other settings (None if they cannot be checked)."""
    wrong = {wrong_key(details) for details in error.errors()}
    for key in wrong:
        take(settings, key)
    for key in ("actor_rollout_ref.model.path", "trainer.experiment_name"):
        if get(settings, key) is ABSENT:
            put(settings, key.split("."), "missing")
            wrong.add(key)
    try:
        return frozenset(wrong), RunConfig.model_validate(settings)
    except (ValidationError, InputError):
        return frozenset(wrong), None


def _drop_what_is_none(settings: dict[str, Any]) -> None:
    """Remove groups that verl's files set to null, and a reward function without a path.

    These are `algorithm.rollout_correction: null`, `filter_groups: null` and
    `custom_reward_function: {path: null, ...}`.
    """
    for name in ("rollout_correction", "filter_groups"):
        if get(settings, f"algorithm.{name}") is None:
            take(settings, f"algorithm.{name}")
    group = settings.get("custom_reward_function")
    if isinstance(group, dict) and group.get("path", ABSENT) is None:
        del settings["custom_reward_function"]


def _shorten(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"
