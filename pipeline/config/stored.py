"""The settings in run.json, which are resolved once, when the run is created."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipeline.config.tree import RunConfig
from pipeline.errors import InputError


def read_stored(settings: Mapping[str, Any], name: str) -> RunConfig:
    """Read the typed settings of a run.

    `name` identifies the object in error messages. Raises an InputError that lists every key that
    is missing, invalid or unknown.
    """
    try:
        return RunConfig.model_validate(settings)
    except ValidationError as error:
        problems = ((".".join(map(str, one["loc"])), one) for one in error.errors())
        raise InputError(
            [
                f"{name}: {key}: found {one['input']!r}: {one['msg']}; use the version of retrace "
                "that created the run"
                for key, one in problems
            ]
        ) from error
