"""The typed settings of a run description.

This module is separate from `description` because traces must not depend on pydantic.
"""

from pipeline.config.stored import read_stored
from pipeline.config.tree import RunConfig
from pipeline.run import keys
from pipeline.run.description import RunDescription


def config_of(run: RunDescription) -> RunConfig:
    """Return the typed settings in a run's description.

    Raises InputError for settings that this version of Retrace does not accept.
    """
    return read_stored(run.settings, f"{keys.run_json()} of the run {run.name!r}")
