"""The settings in run.json, which are resolved once, when the run is created.

A setting that is newer than the run takes the value that applies to older runs (`formerly`), not
the current default. A new default therefore does not change existing runs.
"""

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipeline.config.dotted import ABSENT, get
from pipeline.config.keys import Key, all_keys, is_set, setting_keys, value_at, with_value
from pipeline.config.tree import RunConfig
from pipeline.errors import InputError


def read_stored(settings: Mapping[str, Any], name: str) -> RunConfig:
    """Read the typed settings of a run that this or an older version of Retrace created.

    `name` identifies the object in error messages. Raises an InputError that lists every
    key that is missing, invalid or unknown.
    """
    found = copy.deepcopy(dict(settings))
    missing = [key.name for key in all_keys().values() if not _complete(found, key)]
    if missing:
        raise InputError(
            [
                f"{name}: {key}: found no value, and the value that applies to runs older than "
                "this setting is unknown; use the version of retrace that created the run"
                for key in missing
            ]
        )
    try:
        return RunConfig.model_validate(found)
    except ValidationError as error:
        problems = ((".".join(map(str, one["loc"])), one) for one in error.errors())
        raise InputError(
            [
                f"{name}: {key}: found {one['input']!r}: {one['msg']}; use the version of retrace "
                "that created the run"
                for key, one in problems
            ]
        ) from error


def with_former_values(
    config: RunConfig, stored: Mapping[str, Any]
) -> tuple[RunConfig, dict[str, Any]]:
    """Adapt a user's settings to a run that is older than some of today's settings.

    A setting that is part of the run's identity is adapted if the user did not set it and the
    run's stored settings either lack it or contain its former value. It then takes the former value
    instead of today's default. Returns the settings, and the adapted values by dotted key.
    """
    taken = {
        key.name: key.former
        for key in setting_keys()
        if key.is_new
        and not key.operational
        and _group_is_used(config, key.name)
        and get(stored, key.name) in (ABSENT, key.former)
        and not is_set(config, key.name)
        and value_at(config, key.name) != key.former
    }
    for name, value in taken.items():
        config = with_value(config, name, value)
    return config, taken


def _group_is_used(config: RunConfig, name: str) -> bool:
    group = name.rpartition(".")[0]
    return not group or value_at(config, group) is not None


def _complete(settings: dict[str, Any], key: Key) -> bool:
    """Fill in a missing setting; return False if its value is unknown."""
    *groups, last = key.name.split(".")
    group: Any = settings
    for part in groups:
        group = group.get(part) if isinstance(group, dict) else None
    if not isinstance(group, dict) or last in group:
        return True  # present, or in a group that is null, or in a group already reported missing
    if key.is_new:
        group[last] = copy.deepcopy(key.former)
    elif key.section is not None and not key.nullable:
        group[last] = {}  # a new group: each of its settings takes the value for older runs
    else:
        return False
    return True
