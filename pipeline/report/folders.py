"""Where a run's files lie on the flow's machine."""

from pathlib import Path

from pipeline.config.tree import RunConfig


def local_folder(config: RunConfig) -> Path:
    """Where a run's logs, its server's log and its trackers' files lie on the flow's machine."""
    return Path(config.trainer.default_local_dir, config.trainer.run_name)


def log_folder(config: RunConfig) -> Path:
    """Where the logs of a run's local workers lie."""
    return local_folder(config) / "logs"


def tensorboard_folder(config: RunConfig) -> Path:
    """Where a run's TensorBoard files lie."""
    return local_folder(config) / "tensorboard"
