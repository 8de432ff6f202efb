"""Where metrics go while a run is going on."""

from pathlib import Path
from typing import Protocol

from pipeline.config.tree import RunConfig
from pipeline.metrics.former import Metrics


def tensorboard_folder(config: RunConfig) -> Path:
    """Where a run's TensorBoard files lie on the flow's machine."""
    return local_folder(config) / "tensorboard"


def local_folder(config: RunConfig) -> Path:
    """Where a run's logs and TensorBoard files lie on the flow's machine, and its server's log."""
    return Path(config.trainer.default_local_dir, config.trainer.run_name)


def log_folder(config: RunConfig) -> Path:
    """Where the logs of a run's local workers lie."""
    return local_folder(config) / "logs"


class Logger(Protocol):
    """One place that takes metrics."""

    def log(self, step: int, values: Metrics) -> None:
        """Take the metrics of a step; those that are None were not measured."""

    def close(self) -> None:
        """Write what is buffered."""


class TensorBoardLogger:
    """TensorBoard event files in one folder per run."""

    def __init__(self, folder: Path) -> None:
        # TensorBoard's own writer: torch.utils.tensorboard would bring torch into the flow.
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder))

    def log(self, step: int, values: Metrics) -> None:
        """See Logger.log."""
        for key, value in values.items():
            if value is not None:
                self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def close(self) -> None:
        """See Logger.close."""
        self._writer.close()
