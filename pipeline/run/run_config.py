"""The typed settings of a run description; in a module of its own, as traces need no pydantic."""

from pipeline.config.stored import read_stored
from pipeline.config.tree import RunConfig
from pipeline.run import keys
from pipeline.run.description import RunDescription


def config_of(run: RunDescription) -> RunConfig:
    """The typed settings of a run, as its description has them.

    Raises InputError for settings that this version cannot accept.
    """
    return read_stored(run.settings, f"{keys.run_json()} of the run {run.name!r}")
