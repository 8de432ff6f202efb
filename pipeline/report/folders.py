"""The folders of a run's local files on the flow's machine."""

from pathlib import Path

from pipeline.config.tree import RunConfig
from pipeline.errors import InputError


class NoLogsError(InputError):
    """This machine has no logs of a run. The run's workers may not have started yet."""


def local_folder(config: RunConfig) -> Path:
    """Return the folder for the workers' logs, the Prefect server's log and the trackers' files."""
    return Path(config.trainer.default_local_dir, config.trainer.run_name)


def log_folder(config: RunConfig) -> Path:
    """Return the folder of the logs of a run's local workers."""
    return local_folder(config) / "logs"


def tensorboard_folder(config: RunConfig) -> Path:
    """Return the folder of a run's TensorBoard files."""
    return local_folder(config) / "tensorboard"
