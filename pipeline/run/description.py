"""run.json: the description of a run, written once by the flow when the run is created.

Later attempts may amend the description. `amendments` reads the description that applies now, or
the one that applies to a step. `attempts` returns a description's settings as typed settings.
"""

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from dataclasses import field as field_of
from typing import Any

from pipeline.model.geometry import Geometry, geometry_json, parse_geometry
from pipeline.run import keys
from pipeline.run.commit import (
    CorruptObjectError,
    DataFile,
    commit,
    new_write_id,
    parse_file,
    read_commit,
)
from pipeline.run.parse import field, key, mapping, number, text
from pipeline.store.base import Store

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
    functions: Mapping[str, DataFile] = field_of(default_factory=dict)
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


def create_description(store: Store, ours: RunDescription) -> RunDescription:
    """Create run.json, or read the one that another flow created first.

    Returns the stored description. Raises StoreError and CorruptObjectError.
    """
    body = commit(store, keys.run_json(), description_json(ours), new_write_id()).body
    return parse_description(body, store.uri)


def read_created(store: Store) -> RunDescription:
    """Read the original description of a run. Raises ObjectMissingError and CorruptObjectError."""
    return parse_description(read_commit(store, keys.run_json()), store.uri)


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
        found = field(body, "format", number)
        if found != FORMAT:
            raise ValueError(f"format {found}, expected {FORMAT}")
        return RunDescription(
            name=field(body, "name", key),
            settings=field(body, "config", mapping),
            inputs=field(body, "inputs", _inputs),
            geometry=field(body, "geometry", parse_geometry),
            versions=field(body, "versions", _texts),
        )
    except ValueError as error:
        raise CorruptObjectError(
            f"{keys.run_json()} in {uri}: not the description of a run: {error}; restore the "
            "object, or use the version of retrace that wrote it"
        ) from error


def parse_optional_file(value: Any) -> DataFile | None:
    """Parse the entry of a data file that may be absent (null). Raises TypeError and ValueError."""
    return None if value is None else parse_file(value)


def parse_files(value: Any) -> dict[str, DataFile]:
    """Parse the entries of data files, keyed by name. Raises TypeError and ValueError."""
    body = mapping(value)
    return {name: field(body, name, parse_file) for name in body}


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


def _texts(value: Any) -> dict[str, str]:
    body = mapping(value)
    return {name: field(body, name, text) for name in body}


def _inputs(value: Any) -> StagedInputs:
    body = mapping(value)
    return StagedInputs(
        prompts=field(body, "prompts", parse_file),
        val_prompts=field(body, "val_prompts", parse_optional_file),
        reward=field(body, "reward", parse_optional_file),
        model=field(body, "model", parse_files),
        functions=parse_files(body.get("functions", {})),  # older runs lack the field
    )
