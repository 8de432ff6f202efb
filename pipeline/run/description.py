"""run.json: the description of a run, written once by the flow when the run is created.

An attempt may continue the run with another parallel layout, or with an input on which no commit
depends yet. Its object, attempts/NNN.json, contains all that differs from run.json.
`pipeline.run.attempts` returns a description's settings as typed settings.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from pipeline.model.geometry import Geometry, geometry_json, parse_geometry
from pipeline.run import keys
from pipeline.run.commit import (
    CONTENT_SHA256,
    CorruptObjectError,
    DataFile,
    commit,
    find_commit,
    new_write_id,
    parsing,
    read_commit,
)
from pipeline.run.parse import convert
from pipeline.run.restarts import attempt_count
from pipeline.store.base import ObjectMissingError, Store

INPUTS = "inputs."
"""Prefix of the names of inputs among an attempt's changes."""
FORMAT = 1
"""Format version of run.json."""


@dataclass(frozen=True)
class StagedInputs:
    """The input files of a run, as copied into its own store."""

    prompts: DataFile
    val_prompts: DataFile | None
    """None if the run has no validations."""
    reward: DataFile | None
    """None if the run uses built-in scorers or replays a recorded set with rewards."""
    model: Mapping[str, DataFile]
    """Weights, config and tokenizer of policy 0, keyed by file name."""
    functions: Mapping[str, DataFile] = field(default_factory=dict)
    """Files with users' estimators and losses, keyed by the setting that names the function."""

    def files(self) -> list[DataFile]:
        """Return all staged files."""
        single = (self.prompts, self.val_prompts, self.reward)
        known = (file for file in single if file is not None)
        return [*known, *self.model.values(), *self.functions.values()]


@dataclass(frozen=True)
class RunDescription:
    """A run's identity. Example: RunDescription('quickstart', {'data': {...}, ...}, ...)."""

    name: str
    settings: Mapping[str, Any]
    """All settings with their values, as JSON; stored under "config"."""
    inputs: StagedInputs
    geometry: Geometry | None
    """None for a dense model."""
    versions: Mapping[str, str]
    """Versions of Retrace, Python and the packages in the flow's environment."""

    def setting(self, name: str) -> Any:
        """Return the value of the setting with the given dotted key.

        Raises CorruptObjectError if the setting is missing.
        """
        value: Any = self.settings
        for part in name.split("."):
            if not isinstance(value, Mapping) or part not in value:
                raise CorruptObjectError(f"{keys.run_json()}: config: {name} is missing")
            value = value[part]
        return value


class _Stored(msgspec.Struct):
    """The JSON form of a description."""

    format: int
    name: str
    config: dict[str, Any]
    inputs: StagedInputs
    geometry: dict[str, Any] | None
    versions: dict[str, str]


def create_description(store: Store, ours: RunDescription) -> RunDescription:
    """Create run.json, or read the one that another flow created first.

    Returns the stored description. Raises StoreError and CorruptObjectError.
    """
    body = commit(store, keys.run_json(), description_json(ours), new_write_id()).body
    return parse_description(body, store.uri)


def read_created(store: Store) -> RunDescription:
    """Read the original description of a run. Raises ObjectMissingError and CorruptObjectError."""
    return parse_description(read_commit(store, keys.run_json()), store.uri)


def description_now(store: Store) -> RunDescription:
    """Read the description of a run as its newest attempt uses it.

    Raises ObjectMissingError if the run does not exist. Also raises CorruptObjectError.
    """
    run, changes = read_created(store), newest_changes(store)
    with parsing(store, keys.attempts()):
        return changed(run, changes)


def newest_changes(store: Store) -> Mapping[str, Any]:
    """Return what differs from run.json in the newest attempt of a run; see `changed`."""
    number = attempt_count(store) - 1
    if number < 0:
        return {}
    try:
        found = read_commit(store, keys.attempt(number)).get("changes", {})
    except ObjectMissingError as error:
        raise CorruptObjectError(f"{error}; restore the object") from error
    with parsing(store, keys.attempt(number)):
        return convert(found, dict[str, Any])


def find_description(store: Store) -> RunDescription | None:
    """Read the same description as `description_now`; return None if the run does not exist.

    Raises CorruptObjectError.
    """
    try:
        return description_now(store)
    except ObjectMissingError:
        return None


def changed(run: RunDescription, changes: Mapping[str, Any]) -> RunDescription:
    """Return a description with an attempt's changes.

    Args:
        run: The description in run.json.
        changes: New values, keyed by the dotted key of a setting, such as trainer.nnodes, or by the
            name of an input, such as inputs.prompts, whose value is the JSON form of its files.

    Raises:
        ValueError: A change is not valid.
    """
    inputs = asdict(run.inputs)
    settings = {}
    for name, value in changes.items():
        if name.startswith(INPUTS):
            inputs[name.removeprefix(INPUTS)] = value
        else:
            settings[name] = value
    return replace(
        run,
        settings=with_settings(run.settings, settings),
        inputs=convert(inputs, StagedInputs),
    )


def run_digest(store: Store) -> str | None:
    """Return the digest of run.json, which identifies a run in traces; None if it does not exist.

    Raises StoreError and CorruptObjectError.
    """
    body = find_commit(store, keys.run_json())
    return None if body is None else str(body[CONTENT_SHA256])


def description_json(run: RunDescription) -> dict[str, Any]:
    """Return the stored form of a description."""
    return {
        "format": FORMAT,
        "name": run.name,
        "config": run.settings,
        "inputs": asdict(run.inputs),
        "geometry": geometry_json(run.geometry),
        "versions": run.versions,
    }


def parse_description(body: Mapping[str, Any], uri: str) -> RunDescription:
    """Parse the stored description of the run in the store `uri`.

    Raises CorruptObjectError if a field is missing or invalid (the message names it), or if the
    description has a different format version.
    """
    try:
        found = convert(body, _Stored)
        if found.format != FORMAT:
            raise ValueError(f"format {found.format}, expected {FORMAT}")
        geometry = parse_geometry(found.geometry)
        return RunDescription(found.name, found.config, found.inputs, geometry, found.versions)
    except ValueError as error:
        raise CorruptObjectError(
            f"{keys.run_json()} in {uri}: not the description of a run: {error}; restore the "
            "object, or use the version of retrace that wrote it"
        ) from error


def with_settings(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of settings, with new values for the dotted keys in `changes`.

    Raises ValueError if a part of a dotted key names a setting instead of a group.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(settings))
    for name, value in changes.items():
        *groups, last = name.split(".")
        group = changed
        for part in groups:
            group = group.setdefault(part, {})
            if not isinstance(group, dict):
                raise ValueError(f"{name}: {part} is {group!r}, not a group of settings")
        group[last] = value
    return changed
