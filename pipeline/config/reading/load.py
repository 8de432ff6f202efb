"""Loading settings: a YAML file, overrides on top, validated at once, all problems shown together.

file ─► merge overrides ─► one spelling per setting ─► verl's keys sorted out ─► typed tree
                                                                  └─► must agree with ─┘
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.dotted import ABSENT, get, is_interpolated, leaves, put, take
from pipeline.config.reading.foreign import IGNORED, Foreign
from pipeline.config.reading.problems import problems_of, wrong_key
from pipeline.config.reading.read import read_file, read_mapping, read_override, read_pair
from pipeline.config.reading.spellings import one_spelling, plain_values
from pipeline.config.reading.undecided import undecided
from pipeline.config.reading.verl import find_foreign
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError


@dataclass(frozen=True)
class LoadedConfig:
    """Settings, with notes for the user."""

    config: RunConfig
    notes: tuple[str, ...]
    """What was read in another way than written, and a line per group of keys without effect."""


class SettingsError(InputError):
    """Settings that cannot be used; the others of them can still be checked.

    `rest` are the settings with those in `wrong`, by dotted key, left out (their defaults, or a
    placeholder, in their place); None: nothing can be said about the others.
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
        if get(settings, key) is ABSENT:
            put(settings, key.split("."), value)
    for override in overrides:
        try:
            put(settings, *_read(override))
        except InputError as error:
            problems += error.problems
    if isinstance(others := settings.get("defaults"), list) and others:
        # The other files of the list have the rest, so nothing more can be said of this one.
        file = "CONFIG.yaml" if isinstance(source, Mapping) else source
        raise InputError(
            [
                *problems,
                f"defaults: found {others!r}, Hydra's list of other files; make one file "
                f"of all: retrace import-verl {file} -o my.yaml",
            ]
        )
    if not isinstance(source, Mapping):
        problems += undecided(Path(source), settings)
    return _load(settings, problems)


def _read(override: str | tuple[str, Any]) -> tuple[list[str], Any]:
    return read_override(override) if isinstance(override, str) else read_pair(*override)


def _load(settings: dict[str, Any], problems: list[str]) -> LoadedConfig:
    for key, value in list(leaves(settings)):
        if value == "???":  # Hydra's mark of a value that is still to be written
            take(settings, key)
    written = one_spelling(settings, problems)
    notes = plain_values(settings)
    foreign = _take_out_foreign(settings)
    interpolated = _take_out_interpolated(settings, foreign, problems)
    _drop_what_is_none(settings)
    notes += _notes_on(foreign, problems)
    try:
        config = RunConfig.model_validate(settings)
    except ValidationError as error:
        problems += problems_of(error, written, skip=interpolated)
        wrong, rest = _without_wrong(settings, error)
        problems += _disagreements(rest, foreign) if rest else []
        raise SettingsError(problems, wrong | interpolated, rest) from error
    problems += _disagreements(config, foreign)
    if problems:
        raise SettingsError(problems, frozenset(interpolated), config)
    return LoadedConfig(config, tuple(notes))


def _take_out_foreign(settings: dict[str, Any]) -> list[tuple[str, Any, Foreign]]:
    """Remove verl's keys that are not ours; return them with their values."""
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
    """Refuse values that Hydra would compute, unless they have no effect; return their keys."""
    ours = {key: value for key, value in leaves(settings) if is_interpolated(value)}
    theirs = [one for one in foreign if is_interpolated(one[1]) and one[2].concern not in IGNORED]
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
            "itself, or let `retrace import-verl` resolve the file"
        )
    return set(ours)


def _notes_on(foreign: list[tuple[str, Any, Foreign]], problems: list[str]) -> list[str]:
    """Notes on verl's keys that are harmless, one per reason; add problems of the others."""
    ignored: dict[str, list[str]] = {}
    for key, value, entry in foreign:
        if entry.accepts(value):
            ignored.setdefault(entry.reason, []).append(key)
        else:
            problems.append(f"{key}: found {value!r}; {entry.refusal}")
    return [f"{_shorten(names)}: ignored; {reason}" for reason, names in ignored.items()]


def _disagreements(config: RunConfig, foreign: list[tuple[str, Any, Foreign]]) -> list[str]:
    """Problems of verl's keys that contradict settings of ours."""
    return [
        f"{key}: found {value!r}; {entry.refusal}"
        for key, value, entry in foreign
        if not entry.accepts_with(config, key, value)
    ]


def _without_wrong(
    settings: dict[str, Any], error: ValidationError
) -> tuple[frozenset[str], RunConfig | None]:
    """The keys that are wrong, and the settings without them: the rest can be checked."""
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
    """Drop verl's forms of none: `algorithm.rollout_correction: null`, `filter_groups: null`, and
    of no reward function: `custom_reward_function: {path: null, ...}`."""
    for name in ("rollout_correction", "filter_groups"):
        if get(settings, f"algorithm.{name}") is None:
            take(settings, f"algorithm.{name}")
    group = settings.get("custom_reward_function")
    if isinstance(group, dict) and group.get("path", ABSENT) is None:
        del settings["custom_reward_function"]


def _shorten(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} more"
